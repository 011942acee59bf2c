"""The serving engine: plain functions on records, compiled or, for a debugger, interpreted."""
