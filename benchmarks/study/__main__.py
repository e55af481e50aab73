"""`python -m benchmarks.study`."""

from benchmarks.study.command import main

raise SystemExit(main())
