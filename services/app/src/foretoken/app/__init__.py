"""The program: composition, serving, configuration and the command line."""
