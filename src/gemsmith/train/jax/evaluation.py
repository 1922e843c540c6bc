"""The loss on held-out rows and answers to their prompts: batches, and the compiled programs that they go through."""

from collections.abc import Callable, Generator
from contextlib import closing, nullcontext

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from gemsmith.data.batches import Batches, BucketShape
from gemsmith.recipe.schema import Train
from gemsmith.train.inputs import Answers, SamplePrompts
from gemsmith.train.jax.compile import Compiled, compile_program
from gemsmith.train.jax.distributed import local_rows, raise_on_all_hosts, shard_batch
from gemsmith.train.jax.images import ImageLayout
from gemsmith.train.jax.step import Step, row_shapes
from gemsmith.train.resume import Stop


class HeldOut:
    """The rows of data.eval in batches, or prompts of those, and for each size of their images a compiled program."""

    def __init__(self, batches: Batches, images: ImageLayout | None, mesh: Mesh, samples: SamplePrompts | None) -> None:
        self._batches, self._images, self._samples = batches, images, samples
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
            program = step.next_tokens if self._samples else step.evaluate
            compiled = compile_program(program, (step.trained, step.frozen, shapes), stop, train)
            if compiled is None:
                return False
            self.compiled[bucket] = compiled
        return True

    def evaluate(self, trained: nnx.State, frozen: nnx.State, told: Callable[[], bool]) -> dict[str, float] | None:
        """Over all rows the sum of the targets' nll, how many targets are correct, and how many there are.

        None where `told` to stop. Raises DataError where an image cannot be read any more.
        """
        total = {"nll": 0.0, "correct": 0.0, "targets": 0.0}
        with closing(self._inputs()) as batches:
            for number, inputs in batches:
                if told():
                    return None
                sums = jax.device_get(self.compiled[self._bucket(number)].update(trained, frozen, inputs))
                total = {name: value + sums[name].item() for name, value in total.items()}
        return total

    def answer(self, trained: nnx.State, frozen: nnx.State, told: Callable[[], bool]) -> Answers | None:
        """The answers to all prompts. None and raises as `evaluate`."""
        assert self._samples is not None, "these are no prompts"

        def next_tokens(number: int, inputs: dict, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray | None:
            if told():
                return None
            bucket = self._bucket(number)
            changed = {"tokens": tokens[self._rows], "loss_mask": mask[self._rows]}
            rows = inputs | shard_batch(changed, self._rows, self._shapes[bucket])
            return np.asarray(jax.device_get(self.compiled[bucket].update(trained, frozen, rows)))

        with closing(self._inputs()) as batches:
            return self._samples.answer(batches, next_tokens)

    def _inputs(self) -> Generator[tuple[int, dict[str, jax.Array]]]:
        """The number of each batch, from 1, and its arrays on the devices."""
        feed = self._images.feed(self._batches, rows=self._rows, first=1) if self._images else None
        with closing(feed) if feed else nullcontext():
            for number in range(1, self._batches.steps + 1):
                if feed is None or self._images is None:
                    arrays = self._batches.batch(number, self._rows).arrays()
                else:
                    taken = feed.take()
                    if taken is None or jax.process_count() > 1:
                        raise_on_all_hosts(None if taken else feed.fault)
                    assert taken is not None, "a batch that is not there has a fault"
                    arrays = self._images.arrays(number, *taken)
                yield number, shard_batch(arrays, self._rows, self._shapes[self._bucket(number)])

    def _bucket(self, number: int) -> BucketShape | None:
        return self._images.buckets.of(number) if self._images else None
