from finetune.doctor.command import main

raise SystemExit(main())
