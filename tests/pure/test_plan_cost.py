"""The model sizes for a plan's costs."""

from preheat.plan.cost import ModelSizes
from tests.specs import LLAMA_8B, llama


def test_sizes_of_models():
    """Sizes equal numbers computed by hand from the sizes that the models publish."""
    sizes = ModelSizes.of(LLAMA_8B)
    assert sizes.layer_params == 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336 + 2 * 4096)
    assert (sizes.head_params, sizes.kv_bytes_per_token) == (128256 * 4096, 128 << 10)
    assert sizes.activation_bytes_per_token == 2 * (2 * 4096 + 3 * 14336)
    assert (sizes.hidden, sizes.vocab, sizes.layers, sizes.kv_heads) == (4096, 128256, 32, 8)
    wide = ModelSizes.of(llama(hidden=8, inner=2, layers=1, heads=4, kv_heads=2, head_dim=6, vocab=10), 4)
    assert wide.activation_bytes_per_token == 4 * (2 * 8 + 6 * (2 * 4 + 2 * 2))
    assert wide.kv_bytes_per_token == 4 * 2 * 2 * 6
