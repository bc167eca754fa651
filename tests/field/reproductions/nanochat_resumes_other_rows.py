"""A loader that goes on from its own state after two batches gives other rows than the next."""

from nanochat.dataloader import tokenizing_distributed_data_loader_with_state_bos_bestfit
from nanochat.tokenizer import get_tokenizer


def batches(state=None):
    """Return batches of four rows, from the begin or from where `state` was taken."""
    return tokenizing_distributed_data_loader_with_state_bos_bestfit(
        get_tokenizer(), 4, 32, split="train", device="cpu", resume_state_dict=state
    )


straight = batches()
next(straight)
_, _, state = next(straight)
expected = next(straight)[0].tolist()
resumed = next(batches(dict(state)))[0].tolist()
same = sum(row in expected for row in resumed)
print(f"seen: of 4 rows after the resume, {same} are those that were to come")
assert same < 4
