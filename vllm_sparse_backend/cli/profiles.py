"""`sparse-prefill check-profile` and `sparse-prefill import-minference`."""

import typer


def add_to(app: typer.Typer) -> None:
    pass
