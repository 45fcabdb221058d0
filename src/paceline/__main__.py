# SPDX-License-Identifier: BSD-3-Clause
"""`python -m paceline` is the same as `paceline`."""

from paceline.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
