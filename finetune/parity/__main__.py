from finetune.parity.command import main

raise SystemExit(main())
