"""What a step has to do and to hold for the pictures of its rows, beside what their soft tokens take as tokens.

Letters: N pictures that a row has room for, P patches and S soft tokens of each, C values of a patch, W the features'
width, F hidden, E the text model's width.
"""

from dataclasses import dataclass

from gemsmith.recipe import Recipe
from gemsmith.zoo import Variant, Vision, VisionTower, lora_targets, parameter_count, vision_tensors

_POSITION_BYTES, _PLACE_BYTES, _VALUE_BYTES = 8, 4, 4


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """The pictures of every row, padded to one shape."""

    vision: Vision
    images: int
    """N."""
    soft_tokens: int
    """S."""
    embed_dim: int
    """E."""
    parameters: int
    """Of all that embeds pictures."""
    whole_parameters: int
    """Of these, what every device holds: embeddings of positions."""
    adapters: int
    """Trained parameters there; without any nothing is walked back."""

    @property
    def patches(self) -> int:
        """P."""
        return self.soft_tokens * self.vision.patches_per_token

    @property
    def row_bytes(self) -> int:
        """Of a row's patches with their positions, and of the places of its soft tokens."""
        patch_bytes = _VALUE_BYTES * self.vision.patch_dim + _POSITION_BYTES
        return self.images * (self.patches * patch_bytes + self.soft_tokens * _PLACE_BYTES)

    @property
    def row_flops(self) -> float:
        """Of a row: once forward; with adapters also once again, and backward."""
        vision, projector = self.vision, self.vision.embed_dim * self.embed_dim
        attention = 0
        if isinstance(vision, VisionTower):
            attention = 4 * vision.layers * vision.heads * vision.head_dim * self.patches**2
        matmuls = 2 * (self.patches * self._parameters_of_a_patch + self.soft_tokens * projector)
        if not self.adapters:
            return float(self.images * (matmuls + attention))
        # Scores are recomputed with their layer, and once more within it.
        return float(self.images * (3 * matmuls + 4.5 * attention + 6 * self.patches * self.adapters))

    @property
    def row_score_bytes(self) -> float:
        """Of a row's scores in the tower, in float32: as XLA has it they are written once and read once, in each pass.

        With adapters they are made twice more, and so is their gradient once.
        """
        if not isinstance(self.vision, VisionTower):
            return 0.0
        scores = self.images * self.vision.layers * self.vision.heads * self.patches**2
        return 2.0 * _VALUE_BYTES * scores * (4 if self.adapters else 1)

    @property
    def width(self) -> int:
        """Numbers of a patch that are there at once, in the layer or projection that has most."""
        vision = self.vision
        if isinstance(vision, VisionTower):
            return (6 * vision.embed_dim + 3 * vision.ffn) * (2 if self.adapters else 1)
        return vision.patch_dim + 4 * vision.embed_dim

    @property
    def saved_width(self) -> int:
        """Numbers of a patch that wait for the backward pass: every layer's input, where something is adapted."""
        vision = self.vision
        return vision.layers * vision.embed_dim if self.adapters and isinstance(vision, VisionTower) else 0

    @property
    def scores_width(self) -> int:
        """Heads whose scores of a block of queries are there at once, counted as often as they are."""
        return self.vision.heads * (3 if self.adapters else 2) if isinstance(self.vision, VisionTower) else 0

    @property
    def _parameters_of_a_patch(self) -> int:
        vision = self.vision
        first = vision.patch_dim * vision.embed_dim
        if not isinstance(vision, VisionTower):
            return first
        return first + vision.layers * vision.embed_dim * (4 * vision.heads * vision.head_dim + 3 * vision.ffn)


def pictures_of(recipe: Recipe, variant: Variant, *, images: int, soft_tokens: int) -> Pictures:
    """The pictures of rows that have room for so many, each of so many soft tokens."""
    assert variant.vision is not None, f"{variant.name} takes no pictures"
    tensors = vision_tensors(variant)
    own = {tensor.name for tensor in tensors}
    targets = [target for target in lora_targets(variant, recipe.lora.targets) if target.name in own]
    return Pictures(
        vision=variant.vision,
        images=images,
        soft_tokens=soft_tokens,
        embed_dim=variant.embed_dim,
        parameters=parameter_count(tensors),
        whole_parameters=parameter_count([tensor for tensor in tensors if tensor.role == "vision_position"]),
        adapters=recipe.lora.rank * sum(sum(target.shape) for target in targets),
    )
