"""Stage 7, cli: the command line; main.py holds the parser, every subcommand has its own file."""
