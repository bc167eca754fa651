"""An independent oracle for fine-tuning: stock `transformers`, with adapters and losses rewritten.

Neither the losses of `train.model` nor `peft` are used. An adapter's layer is y = W x + (alpha /
rank) B (A x). A language model's loss is -log p of each token to predict, given the tokens before
it. A classifier's loss is -log p of the row's class, computed at the row's last token. A step's
loss is the sum of these terms, each times its weight, divided by the sum of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from blake3 import blake3
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule

from entrenar_py.compute.wgpu import capture
from entrenar_py.compute.wgpu.bounds import sensitivity
from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.trace import TensorRecord, Trace
from entrenar_py.systems.finetuned import records
from entrenar_py.systems.finetuned.records import name_in_checkpoint, weights_of
from entrenar_py.systems.finetuned.small_run import LABELS, Fixture, Request
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.model import model, stock
from entrenar_py.train.model.preparation import Prepared

_BEFORE, _DEFAULT = "base_model.model.", ".default.weight"
# Digest of all that a step's comparison depends on -> its results. Runs on other numbers of workers
# make the same steps, and a comparison takes longer than the training.
_KNOWN: dict[bytes, list[trace.Explained]] = {}
_KNOWN_MAX = 500
# Digest of all that a graph depends on, and its inputs' shapes -> the graph. Capturing a graph
# takes longer than all computations with it.
_GRAPHS: dict[tuple[bytes, tuple[torch.Size, ...]], GraphModule] = {}
_GRAPHS_MAX = 50
_HEAD = "score.modules_to_save.default.weight"


class Textbook:
    """A checkpoint's model with the trainer's tensors in it, float32, on the CPU.

    `names` and `shapes` describe the trainer's tensors, in order.
    """

    def __init__(
        self, fixture: Fixture, request: Request, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        import transformers

        self._fixture, self._request, self.shapes = fixture, request, shapes
        self._samples = list(records.stock_rows(fixture))
        is_chat = request.task != "classify"
        kind = transformers.AutoModelForCausalLM if is_chat else transformers.AutoModel
        self._model: Any = kind.from_pretrained(
            fixture.settings.model, dtype=torch.float32, local_files_only=True
        ).eval()
        if request.method == "qlora":
            numbers = {
                name: torch.from_numpy(array) for name, array in records.decoded(fixture).items()
            }
            self._model.load_state_dict(numbers, strict=False)
        self._tensors: Mapping[str, Tensor] = {}
        names = "task", "method", "family", "rank", "alpha", "beta", "label_smoothing"
        read = [getattr(request, name) for name in names]
        weights = _digest(self._model.state_dict().values())
        self._id = f"{type(self).__name__} {read} {shapes}".encode() + weights
        for name, layer in self._model.named_modules():
            if (own := self._adapter_of(name)) is not None:
                layer.register_forward_hook(self._adapt(*own))

    def _adapter_of(self, layer: str) -> tuple[str, str] | None:
        """Return the trainer's names of a layer's A and B; None if it has no adapter."""
        for name in self.shapes:
            path = name.removeprefix(_BEFORE)
            if self._request.task == "classify":  # this model has no head and no prefix
                path = path.partition(".")[2]
            if layer and path == f"{layer}.lora_A{_DEFAULT}":
                return name, name.replace(".lora_A.", ".lora_B.")
        return None

    def _adapt(self, a: str, b: str) -> Any:
        scale = self._request.alpha / self._request.rank

        def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if a not in self._tensors:
                return output
            low = F.linear(inputs[0], self._tensors[a])
            return output + scale * F.linear(low, self._tensors[b])

        return add

    def outputs(self, tensors: Mapping[str, Tensor], tokens: Tensor, mask: Tensor) -> Tensor:
        """Return logits, [n, t, tokens] or [n, classes], for `tokens` [n, t], right-padded.

        Layers with no adapter in `tensors` are the checkpoint's own.
        """
        self._tensors = tensors
        inputs = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
        if self._request.task != "classify":
            if self._request.method == "full":
                logits: Tensor = functional_call(self._model, dict(tensors), (), inputs).logits
                return logits
            return self._model(**inputs).logits  # type: ignore[no-any-return]
        hidden = self._model(**inputs).last_hidden_state
        last = (mask.cumsum(1) == mask.sum(1, keepdim=True)) & (mask == 1)
        pooled = (hidden * last.unsqueeze(-1)).sum(1)
        return F.linear(pooled, tensors[_BEFORE + _HEAD])

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens and mask of rows `ids`, int64 [n, t], and the weights of the targets.

        The weights are float32: of the token at each place, [n, t], or of each class, [n, classes].
        """
        longest = max(len(self._samples[i][0]) for i in ids)
        tokens = torch.zeros(len(ids), longest, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        is_classes = self._request.task == "classify"
        due = torch.zeros(len(ids), len(LABELS) if is_classes else longest)
        for place, index in enumerate(ids):
            given, completion = self._samples[index]
            tokens[place, : len(given)] = torch.tensor(given)
            mask[place, : len(given)] = 1
            if is_classes:
                label = LABELS.index(self._fixture.rows[index]["label"])
                due[place, label] = self.class_weights()[label]
            else:
                due[place, list(completion)] = 1.0
        return tokens, mask, due

    def class_weights(self) -> list[float]:
        """Return each class's weight: 1, 1 / share or its square root; the mean over rows is 1."""
        labels = [row["label"] for row in self._fixture.rows]
        shares = [labels.count(label) / len(labels) for label in LABELS]
        power = {"none": 0.0, "inverse": -1.0, "sqrt_inverse": -0.5}[self._request.class_weights]
        raw = [share**power for share in shares]
        mean = sum(share * weight for share, weight in zip(shares, raw, strict=True))
        return [weight / mean for weight in raw]

    def loss(self, tensors: Mapping[str, Tensor], tokens: Tensor, mask: Tensor, due: Tensor) -> Any:
        """Return the weighted mean of -log p over all targets, 0-d."""
        logs = F.log_softmax(self.outputs(tensors, tokens, mask), -1)
        if self._request.task == "classify":
            return -(logs * due).sum() / due.sum()
        logs = logs[:, :-1].gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
        return -(logs * due[:, 1:]).sum() / due[:, 1:].sum()

    def steps(self, done: Trace) -> Iterator[trace.Explained]:
        """Yield loss and gradients of each step, compared with float64 at the same weights."""
        start = done.of(trace.Start)[0]
        before = start.weights
        for update in done.of(trace.Update):
            if update.rank != start.rank:
                continue
            drawn = [event for event in done.of(trace.Shard) if event.step == update.step]
            ids = [i for event in sorted(drawn, key=lambda event: event.shard) for i in event.ids]
            got = [torch.tensor(update.loss, dtype=torch.float64)]
            got += [self._tensor(name, update.gradient) for name in self.shapes]
            weights = [self._tensor(name, before) for name in self.shapes]
            yield from self._explained(update.step, got, weights, self.batch(ids))
            before = update.weights

    def _explained(
        self, step: int, got: Sequence[Tensor], weights: Sequence[Tensor], batch: Sequence[Tensor]
    ) -> Iterator[trace.Explained]:
        def gradients(*given: Tensor) -> tuple[Tensor, ...]:
            tensors = dict(zip(self.shapes, given, strict=False))
            loss = self.loss(tensors, *given[len(tensors) :])
            return loss, *torch.autograd.grad(loss, list(tensors.values()))

        inputs = [*(weight.requires_grad_() for weight in weights), *batch]
        function_id = b"step" + _digest(self.constants())
        key = self._id + function_id + _digest([*got, *inputs])
        if key not in _KNOWN:
            if len(_KNOWN) >= _KNOWN_MAX:
                _KNOWN.clear()
            graph = self._graph(function_id, gradients, inputs)
            _KNOWN[key] = [*compare("step", step, ["loss", *self.shapes], got, graph, inputs)]
        yield from (replace(one, step=step) for one in _KNOWN[key])

    def constants(self) -> Sequence[Tensor]:
        """Return what the loss of the last batch depends on, besides inputs and request."""
        return ()

    def logits(
        self, name: str, got: Tensor, tensors: Mapping[str, Tensor], ids: Sequence[int]
    ) -> Iterator[trace.Explained]:
        """Yield the logits `got` of rows `ids`, compared with this model's in float64.

        Logits at padding are left out.
        """
        tokens, mask, _ = self.batch(ids)
        kept = mask.float().unsqueeze(-1) if got.dim() == 3 else torch.ones(1)

        def outputs(*given: Tensor) -> tuple[Tensor, ...]:
            held = dict(zip(self.shapes, given, strict=False))
            return (self.outputs(held, tokens, mask) * kept,)

        inputs = list(tensors.values())
        graph = self._graph(b"logits" + _digest([tokens, mask, kept]), outputs, inputs)
        yield from compare(name, None, ["logits"], [got * kept], graph, inputs)

    def _graph(
        self, function_id: bytes, function: capture.Function, inputs: Sequence[Tensor]
    ) -> GraphModule:
        """Return the graph of a function, cached by the function and the shapes of its inputs."""
        key = self._id + function_id, tuple(one.shape for one in inputs)
        if key not in _GRAPHS:
            if len(_GRAPHS) >= _GRAPHS_MAX:
                _GRAPHS.clear()
            _GRAPHS[key] = capture.capture(function, inputs)
        return _GRAPHS[key]

    def _tensor(self, name: str, records: Mapping[str, TensorRecord]) -> Tensor:
        values = records[name].values()
        if values is None:
            raise UsageError("options facts=gradients needs detail: values")
        return torch.tensor(np.array(values)).view(self.shapes[name])


class PairTextbook(Textbook):
    """`Textbook` for preference pairs: the loss is the mean of -log sigmoid(m).

    With label smoothing, it is a weighted mean for both signs of m. The margin m is beta times (the
    sum over the chosen side's completion of log p - log q, minus the same sum over the rejected
    side's). q is the checkpoint's own model.
    """

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return `Textbook.batch` of both rows of each pair, chosen sides first."""
        return super().batch([*(2 * i for i in ids), *(2 * i + 1 for i in ids)])

    def loss(self, tensors: Mapping[str, Tensor], tokens: Tensor, mask: Tensor, due: Tensor) -> Any:
        """Return the mean loss of pairs, 0-d."""
        reference = self._sums({}, tokens, mask, due)
        ratios = self._sums(tensors, tokens, mask, due) - reference
        number = len(tokens) // 2
        margins = self._request.beta * (ratios[:number] - ratios[number:])
        share = self._request.label_smoothing
        right, wrong = torch.log(torch.sigmoid(margins)), torch.log(torch.sigmoid(-margins))
        return -((1 - share) * right + share * wrong).sum() / number

    def _sums(
        self, tensors: Mapping[str, Tensor], tokens: Tensor, mask: Tensor, due: Tensor
    ) -> Tensor:
        logs = F.log_softmax(self.outputs(tensors, tokens, mask), -1)
        logs = logs[:, :-1].gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
        return (logs * due[:, 1:]).sum(1)


def _digest(tensors: Iterable[Tensor]) -> bytes:
    digest = blake3()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {[*tensor.shape]} ".encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.digest()


def compare(
    of: str,
    step: int | None,
    names: Sequence[str],
    got: Sequence[Tensor],
    graph: GraphModule,
    inputs: Sequence[Tensor],
) -> Iterator[trace.Explained]:
    """Yield the distance of each of `got` from `graph` in float64, and its rounding bound.

    The bound is to first order, for any float32 device, from the rounding of every operation.
    """
    found = sensitivity.deviations(got, graph, inputs)
    for name, result, deviation in zip(names, got, found, strict=True):
        yield trace.Explained(
            of=of,
            tensor=name,
            step=step,
            device="cpu",
            software=False,
            finite=bool(result.isfinite().all()),
            num_elements=deviation.num_elements,
            num_bounded=deviation.num_elements,
            element=deviation.element,
            error=deviation.element_error,
            bound=deviation.element_bound,
            total_error=deviation.error,
            total_bound=deviation.bound,
        )


_NUM_ROWS = 3  # rows to compare logits on


def written(
    fixture: Fixture, prepared: Prepared, module: nn.Module, final: Mapping[str, Array]
) -> trace.ReadBack:
    """Write `final` to the output folder; return the tensors that a stock library reads."""
    folder = fixture.settings.output
    stock.save(module, final, prepared.tokenizer, folder)
    read = dict(stock_model(fixture, folder).named_parameters())
    tensors = {
        name: trace.record_tensor(np.ascontiguousarray(read[name].detach().numpy()))
        for name in final
        if name in read
    }
    by = "peft" if fixture.settings.adapts else "transformers"
    return trace.ReadBack(by=by, tensors=tensors)


def stock_model(fixture: Fixture, folder: Path) -> Any:
    """Return the model in `folder`, or the checkpoint with the adapters there, by stock libraries.

    The model is float32 and in evaluation mode. Weights in NF4 are decoded.
    """
    import peft
    import transformers

    is_adapters = (folder / "adapter_config.json").is_file()
    kind: Any = transformers.AutoModelForCausalLM
    options: dict[str, Any] = {}
    if fixture.settings.task == "classify":
        kind, options = transformers.AutoModelForSequenceClassification, {"num_labels": len(LABELS)}
    base = kind.from_pretrained(
        fixture.settings.model if is_adapters else folder,
        dtype=torch.float32,
        local_files_only=True,
        **options,
    )
    if is_adapters and fixture.settings.method == "qlora":
        numbers = {
            name: torch.from_numpy(array) for name, array in records.decoded(fixture).items()
        }
        base.load_state_dict(numbers, strict=False)
    found: Any = peft.PeftModel.from_pretrained(base, str(folder)) if is_adapters else base
    return found.eval()


def merged(
    fixture: Fixture, request: Request, prepared: Prepared, final: Mapping[str, Array]
) -> Iterator[trace.Event]:
    """Merge the written adapters as `entrenar merge` does; yield the merged weights and logits."""
    settings, folder = fixture.settings, fixture.settings.output.parent / "merged"
    load = model.decoded if settings.method == "qlora" else model.trained
    adapted = load(settings, settings.output, prepared.pad_token)
    stock.merge(adapted, prepared.tokenizer, folder)
    yield from adapters("merged", fixture, request, final, weights_of(folder))
    shapes = {name: array.shape for name, array in final.items()}
    textbook = Textbook(fixture, request, shapes)
    tensors = {name: torch.from_numpy(array) for name, array in final.items()}
    ids = range(_NUM_ROWS)
    tokens, mask, _ = textbook.batch(ids)
    for name, place in (("adapter model", settings.output), ("merged model", folder)):
        with torch.no_grad():
            given = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
            logits = stock_model(fixture, place)(**given).logits
        yield from textbook.logits(name, logits, tensors, ids)


def adapters(
    when: str,
    fixture: Fixture,
    request: Request,
    tensors: Mapping[str, Array],
    merged_weights: Mapping[str, Array] | None = None,
) -> Iterator[trace.Adapted]:
    """Yield the matrices of each layer with an adapter."""
    base = (
        records.decoded(fixture)
        if request.method == "qlora"
        else weights_of(fixture.settings.model)
    )
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        layer = name_in_checkpoint(name).partition(".lora_A.")[0]
        b = tensors[name.replace(".lora_A.", ".lora_B.")]
        arrays = {"a": a, "b": b, "base": _as_product(base, layer, a)}
        if merged_weights is not None:
            arrays["merged"] = _as_product(merged_weights, layer, a)
        yield trace.Adapted(
            when=when,
            layer=layer,
            rank=request.rank,
            alpha=request.alpha,
            shape=(b.shape[0], a.shape[1]),
            tensors={key: trace.record_tensor(one, values=True) for key, one in arrays.items()},
        )


def _as_product(weights: Mapping[str, Array], layer: str, a: Array) -> Array:
    """Return a layer's weight as [out, in]; GPT-2 stores it transposed."""
    weight = weights[f"{layer}.weight"]
    is_transposed = ".c_" in f".{layer}"
    return np.ascontiguousarray(weight.T if is_transposed else weight)
