"""What the harness raises."""


class SimtError(RuntimeError):
    """A kernel did what a GPU would not forgive, or the harness cannot run it. The text says which."""
