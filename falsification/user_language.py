"""Bugs of language models' training in scripts, most of them reported, with right twins.

`make twins` tests that the named check finds each bug for its reason. Right ones are judged by the
checks of `language-model-v1`.
"""

from __future__ import annotations

from falsification.user_language_scripts import CHATS, COLUMNS, FLAT, STREAM
from falsification.user_trainers import Twin

WANTED = (
    *("causality", "label_shift", "padding", "packed_documents"),
    *("token_shares", "tied_tables", "one_begin"),
)
_SCRIPTS = {"stream.py": STREAM, "chats.py": CHATS, "flat.py": FLAT, "columns.py": COLUMNS}


def _twin(name: str, script: str, *changes: tuple[str, str], **fields: object) -> Twin:
    return Twin(
        name=name,
        script=script,
        text=_SCRIPTS[script],
        changes=changes,
        wanted=WANTED,
        **fields,  # type: ignore[arg-type]
    )


BUGS = (
    _twin(
        "a language model whose causal mask is dropped",
        "stream.py",
        (
            '        att = att.masked_fill(self.bias[:T, :T] == 0, float("-inf"))\n',
            "",
        ),
        source="transformers #48745, entrenar #310",
        check="causality",
        step=0,
        words="it sees later ones",
    ),
    _twin(
        "a language model whose causal mask is off by one",
        "stream.py",
        (
            "torch.tril(torch.ones(block_size, block_size))",
            "torch.tril(torch.ones(block_size, block_size), 1)",
        ),
        source="classic (tril with a diagonal)",
        check="causality",
        step=0,
        words="it sees later ones",
    ),
    _twin(
        "a causal mask that is not low enough, after large weights",
        "stream.py",
        (
            'self.bias[:T, :T] == 0, float("-inf"))',
            "self.bias[:T, :T] == 0, -1.0)",
        ),
        source="minGPT #75",
        check="causality",
        step=0,
        words="it sees later ones",
    ),
    _twin(
        "a batch norm over positions within the row",
        "stream.py",
        (
            "        x = self.ln_f(x)\n",
            "        x = self.ln_f(x - x.mean(1, keepdim=True))\n",
        ),
        source="MEO #2 (a mean over the sequence)",
        check="causality",
        step=0,
        words="it sees later ones",
    ),
    _twin(
        "targets are the inputs",
        "stream.py",
        ("data[i + 1 : i + 1 + block_size]", "data[i : i + block_size]"),
        source="transformers #3711",
        check="label_shift",
        step=0,
        words="they are not shifted",
    ),
    _twin(
        "targets are shifted by the loader and by the loss",
        "stream.py",
        ("data[i + 1 : i + 1 + block_size]", "data[i + 2 : i + 2 + block_size]"),
        source="InternLM #318",
        check="label_shift",
        step=0,
        words="they are shifted twice",
    ),
    _twin(
        "labels are shifted by the collator, and by transformers again",
        "chats.py",
        (
            '        batch["labels"].append([-100] * len(p) + a + [-100] * pad)\n',
            '        batch["labels"].append([-100] * (len(p) - 1) + a + [-100] * (pad + 1))\n',
        ),
        source="transformers #32944",
        check="label_shift",
        step=0,
        words="they are shifted twice",
    ),
    _twin(
        "labels are the padded tokens",
        "chats.py",
        ("+ a + [-100] * pad)", "+ a + [0] * pad)"),
        source="open-instruct #632",
        check="padding",
        step=0,
        words="count as targets",
    ),
    _twin(
        "padding before the text, and no mask",
        "chats.py",
        (
            '        batch["input_ids"].append(p + a + [0] * pad)\n'
            '        batch["attention_mask"].append([1] * len(p + a) + [0] * pad)\n'
            '        batch["labels"].append([-100] * len(p) + a + [-100] * pad)\n',
            '        batch["input_ids"].append([0] * pad + p + a)\n'
            '        batch["attention_mask"].append([0] * pad + [1] * len(p + a))\n'
            '        batch["labels"].append([-100] * (pad + len(p)) + a)\n',
        ),
        (
            "ddp = Dist",
            "own = policy.model.forward\n"
            "policy.model.forward = lambda *a, **k: own(*a, **{**k, 'attention_mask': None})\n"
            "ddp = Dist",
        ),
        source="transformers #46773",
        check="padding",
        step=0,
        words="if the padding is another token",
    ),
    _twin(
        "the loss is a mean over each micro-batch",
        "chats.py",
        ("ddp(**batch, num_items_in_batch=num_items)", "ddp(**batch)"),
        ("(out.loss * world)", "(out.loss / 2)"),
        source="torchtune #1875",
        check="token_shares",
        step=0,
        words="each loss is the mean over its own tokens",
    ),
    _twin(
        "the loss is divided by each rank's own tokens",
        "chats.py",
        ("    dist.all_reduce(num_items)\n", ""),
        ("(out.loss * world)", "out.loss"),
        source="transformers #34373",
        check="token_shares",
        step=0,
        words="not divided by the tokens of the whole step",
    ),
    _twin(
        "the last layer's weight is replaced by a copy",
        "chats.py",
        (
            "ddp = Dist",
            "policy.lm_head.weight = torch.nn.Parameter(policy.lm_head.weight.detach().clone())\n"
            "ddp = Dist",
        ),
        source="NeMo RL #227",
        check="tied_tables",
        step=0,
        words="which differ",
    ),
    _twin(
        "the template and the tokenizer both begin the text",
        "chats.py",
        ("([1] + prompt", "([1, 1] + prompt"),
        source="DeepSeek-R1 #151",
        check="one_begin",
        step=0,
        words="twice",
    ),
    _twin(
        "positions begin again, and a mask of ones turns that off",
        "flat.py",
        (
            '    named = {"input_ids": ids,',
            '    named = {"input_ids": ids, "attention_mask": [1] * len(ids),',
        ),
        source="transformers #46634",
        check="packed_documents",
        step=0,
        words="though position_ids parts them",
    ),
    _twin(
        "a document's last token predicts the next document",
        "flat.py",
        ("for label in [-100, *text[1:]]]", "for label in text]"),
        source="DataCollatorWithFlattening: separator_id, as documented",
        check="packed_documents",
        step=0,
        words="first token of the next document",
    ),
    _twin(
        "a recurrent network that reads both ways",
        "columns.py",
        ("nn.LSTM(12, 12)", "nn.LSTM(12, 6, bidirectional=True)"),
        source="classic (a bidirectional encoder as a language model)",
        check="causality",
        step=0,
        words="it sees later ones",
    ),
    _twin(
        "columns whose targets are not shifted",
        "columns.py",
        ("text[i + 1 : i + 1 + bptt]", "text[i : i + bptt]"),
        source="transformers #3711",
        check="label_shift",
        step=0,
        words="they are not shifted",
    ),
)

VARIANTS = (
    _twin("right: a stream of tokens", "stream.py"),
    _twin("right: conversations with padding behind", "chats.py"),
    _twin(
        "right: conversations with padding before",
        "chats.py",
        (
            '        batch["input_ids"].append(p + a + [0] * pad)\n'
            '        batch["attention_mask"].append([1] * len(p + a) + [0] * pad)\n'
            '        batch["labels"].append([-100] * len(p) + a + [-100] * pad)\n',
            '        batch["input_ids"].append([0] * pad + p + a)\n'
            '        batch["attention_mask"].append([0] * pad + [1] * len(p + a))\n'
            '        batch["labels"].append([-100] * (pad + len(p)) + a)\n',
        ),
    ),
    _twin("right: documents in one row", "flat.py"),
    _twin("right: columns of a text", "columns.py"),
    _twin(
        "right: two losses, one of the token after the next",
        "stream.py",
        (
            "        return logits, loss\n",
            "        more = F.cross_entropy(self.lm_head(self.ahead(x))[:, :-1].flatten(0, 1), "
            "targets[:, 1:].flatten())\n        return logits, loss + 0.3 * more\n",
        ),
        (
            "        self.wte.weight = self",
            "        self.ahead = nn.Linear(n_embd, n_embd)\n        self.wte.weight = self",
        ),
    ),
    _twin(
        "right: a masked model, that sees both sides",
        "stream.py",
        (
            '        att = att.masked_fill(self.bias[:T, :T] == 0, float("-inf"))\n',
            "",
        ),
        (
            "    return ix.tolist(), x, y\n",
            "    hidden = torch.rand(x.shape, generator=generator).argsort(1) < 5\n"
            "    return ix.tolist(), x.masked_fill(hidden, 0), x.masked_fill(~hidden, -1)\n",
        ),
    ),
    _twin(
        "right: experts that are chosen by token",
        "stream.py",
        (
            "        x = x + self.attn(self.ln_1(x))\n",
            "        x = x + self.attn(self.ln_1(x))\n"
            "        flat, out = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)\n"
            "        best = self.router(flat).softmax(-1).max(-1)\n"
            "        for number, expert in enumerate(self.experts):\n"
            "            rows = best.indices == number\n"
            "            out[rows] = expert(flat[rows]) * best.values[rows, None]\n"
            "        x = x + out.view_as(x)\n",
        ),
        (
            "        self.dropout = ",
            "        self.router = nn.Linear(n_embd, 3)\n"
            "        self.experts = nn.ModuleList(nn.Linear(n_embd, n_embd) for _ in range(3))\n"
            "        self.dropout = ",
        ),
        ("model = DDP(model)", "model = DDP(model, find_unused_parameters=True)"),
    ),
)
