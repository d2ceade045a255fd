"""``python -m adaspec`` is the command line."""

from adaspec.cli import main

raise SystemExit(main())
