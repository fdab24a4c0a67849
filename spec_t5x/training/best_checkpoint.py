"""The parameters of a run that were best on held-out text, and when to stop looking."""

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from spec_t5x.errors import InputError
from spec_t5x.training.run_checkpoints import what_stays, writing_to
from spec_t5x.types import PyTree


class BestCheckpoint:
    """Keeps, in a directory, the parameters of the largest value so far; a context manager.

    What is kept is that of one run, on disk: after a resumption the run goes through some
    steps again, finds the same values there, and keeps what it kept.
    """

    def __init__(self, directory: str | Path, patience: int | None = None):
        """Opens what is kept in ``directory``, if anything is.

        Args:
            directory: made if absent.
            patience: in steps; so long after its best a run is over. None is for ever.
        """
        self._directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=1, create=True, cleanup_tmp_directories=True
            ),
        )
        self._patience = patience
        self.step: int | None = self._manager.latest_step()
        self.value: float | None = None
        if self.step is not None:
            kept = ocp.args.Composite(value=ocp.args.JsonRestore())
            self.value = self._manager.restore(self.step, args=kept)["value"]["value"]

    def __enter__(self) -> "BestCheckpoint":
        return self

    def __exit__(self, *_) -> None:
        self._manager.close()

    def offer(self, step: int, value: float, params: PyTree) -> bool:
        """Keeps the parameters if ``value`` is larger than that of those it has.

        At step 0 a run begins: what is here is of one before, which left no checkpoint.
        """
        if step == 0 and self.step is not None:
            self._manager.delete(self.step)
            self.step = self.value = None
        # Earlier steps than the one that is kept are gone through again.
        if self.value is not None and (value <= self.value or step <= self.step):
            return False
        kept = ocp.args.Composite(
            params=ocp.args.StandardSave(params), value=ocp.args.JsonSave({"value": value})
        )
        with writing_to(self._directory):
            self._manager.save(step, args=kept, force=True)
            # The run's own checkpoint comes after, and what it goes on from must be here.
            self._manager.wait_until_finished()
        self.step, self.value = step, value
        return True

    def what_stays(self) -> str:
        """Which parameters are kept, in words."""
        return what_stays(self._directory)

    def is_over(self, step: int) -> bool:
        """Whether the best is ``patience`` steps ago."""
        if self._patience is None or self.step is None:
            return False
        return step - self.step >= self._patience

    def restore(self, like: PyTree) -> PyTree:
        """The best parameters.

        Args:
            like: parameters of the same shapes and types.

        Raises:
            InputError: nothing was kept, or it is of another model.
        """
        if self.step is None:
            raise InputError(f"nothing is kept in {self._directory}: train first")
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        kept = ocp.args.Composite(params=ocp.args.StandardRestore(shapes))
        try:
            return self._manager.restore(self.step, args=kept)["params"]
        except ValueError as error:
            raise InputError(
                f"the checkpoint of step {self.step} in {self._directory} is of another "
                "model: give another output directory"
            ) from error
