"""`python -m foretoken.app` is the `foretoken` program."""

from foretoken.app.cli.main import main

main()
