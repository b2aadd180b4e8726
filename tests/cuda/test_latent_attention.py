"""Attention over latent vectors of the sizes of GLM-4.7-Flash, on a GPU: the same bits in every layout and mode."""

import pytest
import torch

from preheat.backends.cuda.attention.latent_few import FewConfig
from preheat.backends.cuda.attention.paged import AttentionConfig
from tests.kernels.latents import DECODE, FEW, PROMPT, VERIFY, LatentPages, Sizes

SPLIT = 512
LENGTHS = [1, 700, 1300]
CONFIGS = [AttentionConfig(rows=16, warps=4, stages=2, programs=1), AttentionConfig(32, 8, 3, 1)]


@pytest.fixture(scope="module", params=[16, 20])
def whole(request):
    """Pages, and the attention of whole sequences in one step."""
    made = LatentPages(Sizes(heads=request.param, rank=512, rope=64), LENGTHS, device="cuda")
    return made, made.run([(i, 0, n) for i, n in enumerate(LENGTHS)], PROMPT, SPLIT).split(LENGTHS)


def test_close_to_float64(whole):
    made, outputs = whole
    for i, out in enumerate(outputs):
        right = made.exact(i)
        assert ((out - right).norm() / right.norm()).item() < 4e-3


def test_decoding_rows_have_the_bits_of_prompts(whole):
    made, outputs = whole
    work = [(2, 1299, 1), (1, 511, 1), (0, 0, 1), (2, 512, 1), (1, 699, 1)]
    right = torch.stack([outputs[i][p] for i, p, _ in work])
    for config in (None, *CONFIGS):
        assert torch.equal(made.run(work, DECODE, SPLIT, config=config), right)
    for few in (None, FewConfig(rows=32, keys=64, numbers=128, score_warps=8), FewConfig(rows=16, programs=1)):
        assert torch.equal(made.run(work, FEW, SPLIT, config=few), right)


def test_drafts_and_chunks_have_the_bits_of_prompts(whole):
    made, outputs = whole
    drafts = [(2, 1290, 6), (1, 509, 6), (0, 0, 1)]
    right = torch.cat([outputs[i][p : p + n] for i, p, n in drafts])
    for config, room in ((None, None), (None, 3), (CONFIGS[0], 3), (CONFIGS[1], None)):
        assert torch.equal(made.run(drafts, VERIFY, SPLIT, config=config, room=room), right)
    for config in CONFIGS:
        found = made.run([(1, 3, 600), (2, 500, 800)], PROMPT, SPLIT, config=config)
        assert torch.equal(found, torch.cat([outputs[1][3:603], outputs[2][500:]]))


def test_another_split_gives_other_bits(whole):
    """Negative control."""
    made, outputs = whole
    assert not torch.equal(made.run([(2, 1299, 1)], DECODE, 256)[0], outputs[2][1299])
