"""The loss on held-out rows: their batches, and the compiled programs that they go through."""

from collections.abc import Callable
from contextlib import ExitStack

import jax
from flax import nnx
from jax.sharding import Mesh

from gemsmith.data.batches import Batches, BucketShape
from gemsmith.recipe.schema import Train
from gemsmith.train.jax.compile import Compiled, compile_program
from gemsmith.train.jax.distributed import local_rows, raise_on_all_hosts, shard_batch
from gemsmith.train.jax.images import ImageFeed, ImageLayout
from gemsmith.train.jax.step import Step, row_shapes
from gemsmith.train.resume import Stop


class HeldOut:
    """The rows of data.eval in batches, and a program for each size that their images are padded to."""

    def __init__(self, batches: Batches, images: ImageLayout | None, mesh: Mesh) -> None:
        self._batches, self._images = batches, images
        sizes = {"rows": batches.global_batch_size, "length": batches.rows.tokens.shape[1]}
        self._shapes = {
            self._bucket(number): row_shapes(mesh, **sizes, images=images.shape(number) if images else None)
            for number in range(1, batches.steps + 1)
        }
        self._rows = local_rows(next(iter(self._shapes.values()))["tokens"])
        self.compiled: dict[BucketShape | None, Compiled] = {}

    def compile(self, step: Step, stop: Stop, train: Train) -> bool:
        """Whether all programs are there, before `stop` was set."""
        for bucket, shapes in self._shapes.items():
            compiled = compile_program(step.evaluate, (step.trained, step.frozen, shapes), stop, train)
            if compiled is None:
                return False
            self.compiled[bucket] = compiled
        return True

    def evaluate(self, trained: nnx.State, frozen: nnx.State, told: Callable[[], bool]) -> dict[str, float] | None:
        """Over all rows the sum of the targets' nll, how many targets are correct, and how many there are.

        None where `told` to stop. Raises DataError where an image cannot be read any more.
        """
        total = {"nll": 0.0, "correct": 0.0, "targets": 0.0}
        with ExitStack() as stack:
            feed = None
            if self._images:
                feed = ImageFeed(self._batches, self._images, rows=self._rows, first=1)
                stack.callback(feed.close)
            for number in range(1, self._batches.steps + 1):
                if told():
                    return None
                arrays = feed.take() if feed else self._batches.batch(number, self._rows).arrays()
                if arrays is None or (feed and jax.process_count() > 1):
                    raise_on_all_hosts(feed.fault if feed and arrays is None else None)
                assert arrays is not None, "a batch that is not there has a fault"
                bucket = self._bucket(number)
                inputs = shard_batch(arrays, self._rows, self._shapes[bucket])
                sums = jax.device_get(self.compiled[bucket].update(trained, frozen, inputs))
                total = {name: value + sums[name].item() for name, value in total.items()}
        return total

    def _bucket(self, number: int) -> BucketShape | None:
        return self._images.buckets.of(number) if self._images else None
