"""A dry run on a device so slow that the limit is reached after $STEPS steps."""

import os

from finetune import train
from finetune.measure import trial


class LittleTime(trial.TimeBudget):
    steps = 0

    @property
    def over(self) -> bool:
        return self.steps >= int(os.environ["STEPS"])

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.steps = state.global_step
        super().on_step_end(args, state, control, **kwargs)


if __name__ == "__main__":
    trial.TimeBudget = LittleTime
    raise SystemExit(train.main())
