"""Puts `--name=value` into the globals of the script that executes it."""

import ast
import sys

for argument in sys.argv[1:]:
    name, _, text = argument.removeprefix("--").partition("=")
    try:
        globals()[name] = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        globals()[name] = text
