"""The whole way from a target to a folder with a drafter: collect, begin, train, write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.feature_load import read_feature_drafter, save_feature_drafter
from adaspec.decoding.feature_net import FeatureNet, FeatureShape
from adaspec.decoding.load import load_model
from adaspec.decoding.model import Model, load_module, load_tokenizer, stop_token_ids
from adaspec.files import read_text
from adaspec.training.card import card
from adaspec.training.collect import Collector, Dialogue, Recipe, Text, read_shard, write_shard
from adaspec.training.prompts import DEFAULT, Kind, PromptSource, read_prompts
from adaspec.training.start import Ridge, frequent_tokens, guess, like_the_last_layer, shape_of
from adaspec.training.trainer import Schedule, Trainer
from adaspec.training.unroll import Head, curve

Tell = Callable[[str, float | None], None]


@dataclass(frozen=True, slots=True)
class Distillation:
    """What to distil, and where to.

    Args:
        target: its name, as the card tells it.
        source: its folder.
        out: where the drafter goes; the work in progress lies beside it in ``work``.
        prompts: TOML file of prompts, see ``prompts``.
        texts: files of given text to learn from as well.
        tokens: of the target's own output to collect, prompts included.
        vocabulary: tokens that the drafter can draft.
        begin: a drafter of the same target to go on from; else it begins in closed form.
        begin_tokens: tokens for the closed-form beginning; 0: it begins at random.
        answer_tokens: longest held-out answer.
        device: where target and drafter compute.

    Raises:
        ValueError: a number out of range.
    """

    target: str
    source: Path
    out: Path
    prompts: Path = DEFAULT
    texts: tuple[Path, ...] = ()
    tokens: int = 400_000
    vocabulary: int = 12_288
    begin: Path | None = None
    begin_tokens: int = 12_000
    answer_tokens: int = 128
    device: str = "cpu"
    recipe: Recipe = field(default_factory=Recipe)
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        for name in ("tokens", "vocabulary", "answer_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")

    @property
    def work(self) -> Path:
        return self.out / "work"

    @property
    def given(self) -> list[tuple[Path, Path]]:
        """The given texts, and where each lies once the target has read it."""
        return [(text, self.work / f"text-{count:04d}.safetensors") for count, text in enumerate(self.texts)]


@dataclass(frozen=True, slots=True)
class Distilled:
    """What came of it: acceptance by position on held-out answers, per kind and ``all``, before and after."""

    steps: int
    before: list[float]
    after: dict[str, list[float]]
    tokens: int
    parameters: int


def distil(job: Distillation, tell: Tell) -> Distilled:
    """Runs or resumes a distillation; every step that is done already is taken from the work folder.

    What cannot be done is refused before the target's output is collected, which takes hours.

    Raises:
        ValueError: a target that has no features or too few positions, or files that do not fit together.
    """
    torch.manual_seed(job.schedule.seed)
    kinds = read_prompts(job.prompts)
    for source, path in job.given:
        if not path.exists():
            read_text(source, "--text")
    tell("load the target", None)
    tokenizer = load_tokenizer(job.source)
    precision = "fp16" if job.device == "cpu" else "float32"
    model = load_model(job.target, job.source, precision=precision, device=job.device, tell=tell)
    module, stops = model.module, stop_token_ids(model.module, tokenizer)
    collector = Collector(model, Dialogue(tokenizer, stops), job.recipe)
    collector.check([prompt for kind in kinds.values() for prompt in kind.held_out], job.answer_tokens)
    net = _network(job, module)
    _claim(job)
    given = list(_given_shards(job, collector, tokenizer, tell))
    own = list(_own_shards(job, collector, kinds, tell))
    texts = [text for path in (*own, *given) for text in read_shard(path)]
    held_out = {kind: read_shard(path) for kind, path in _held_out(job, collector, kinds, tell)}
    token_map, rows = _begin(job, model, net, texts, stops, tell)
    head = Head(rows.to(job.device), token_map.to(job.device))
    embed = module.get_input_embeddings()
    judged_by = [text for found in held_out.values() for text in found]
    trainer = Trainer(net, embed, head, texts, judged_by, job.schedule, job.work / "state.safetensors")
    trainer.run(tell)
    tied = bool(module.config.get_text_config().tie_word_embeddings)
    after = {kind: curve(trainer.judged(found)) for kind, found in held_out.items()}
    after["all"] = curve(trainer.judged(judged_by))
    save_feature_drafter(job.out, net, token_map, None if tied else rows, job.target, after["all"])
    result = Distilled(
        steps=trainer.step,
        before=trainer.history[0][1],
        after=after,
        tokens=sum(len(text.tokens) for text in texts),
        parameters=sum(each.numel() for each in net.parameters()),
    )
    (job.out / "README.md").write_text(card(job.target, _settings(job), asdict(result)), encoding="utf-8")
    return result


def _settings(job: Distillation) -> dict[str, Any]:
    """What the result depends on, without machine paths."""
    return {
        "prompts": job.prompts.name,
        "texts": [path.name for path in job.texts],
        "tokens": job.tokens,
        "vocabulary": job.vocabulary,
        "begin": job.begin.name if job.begin else None,
        "begin_tokens": job.begin_tokens,
        "answer_tokens": job.answer_tokens,
        "recipe": asdict(job.recipe),
        "schedule": asdict(job.schedule),
    }


def _claim(job: Distillation) -> None:
    """Marks the work folder as this job's, so that another one does not go on from its files."""
    job.work.mkdir(parents=True, exist_ok=True)
    path, mine = job.work / "job.json", json.dumps({"target": job.target, **_settings(job)}, indent=2)
    if path.exists() and path.read_text(encoding="utf-8") != mine:
        raise ValueError(
            f"{job.work} holds another distillation ({path.name} tells which); remove it, or take its values"
        )
    path.write_text(mine, encoding="utf-8")


def _own_shards(job: Distillation, collector: Collector, kinds: dict[str, Kind], tell: Tell) -> Iterator[Path]:
    count, passes = 0, job.recipe.passes
    wanted = -(-job.tokens // (passes * job.recipe.rows))
    for count in range(wanted):
        path = job.work / f"shard-{count:04d}.safetensors"
        if not path.exists():
            prompts = PromptSource(kinds, f"{job.recipe.seed}/{count}")

            def told(done: int, count: int = count) -> None:
                share = (count + done / passes) / wanted
                tell(f"collect the target's output, part {count + 1} of {wanted}", share)

            write_shard(path, collector.shard(prompts, count, told))
        yield path


def _given_shards(job: Distillation, collector: Collector, tokenizer: Any, tell: Tell) -> Iterator[Path]:
    for source, path in job.given:
        if not path.exists():
            tell(f"read {source.name}", None)
            text = read_text(source, "--text")
            write_shard(path, list(collector.read(tokenizer(text, add_special_tokens=False)["input_ids"])))
        yield path


def _held_out(
    job: Distillation, collector: Collector, kinds: dict[str, Kind], tell: Tell
) -> Iterator[tuple[str, Path]]:
    for name, kind in kinds.items():
        path = job.work / f"held-out-{name}.safetensors"
        if not path.exists():
            tell(f"held-out answers: {name}", None)
            write_shard(path, collector.answers(kind.held_out, job.answer_tokens))
        yield name, path


def _network(job: Distillation, module: Any) -> FeatureNet:
    """A drafter of the target's sizes, or the one that is gone on from."""
    shape = shape_of(module.config.get_text_config())
    return FeatureNet(shape) if job.begin is None else _like(read_feature_drafter(job.begin).net, shape, job.begin)


def _begin(
    job: Distillation, model: Model, net: FeatureNet, texts: list[Text], stops: tuple[int, ...], tell: Tell
) -> tuple[Tensor, Tensor]:
    """Sets ``net`` to where training begins; the reduced vocabulary [D] and its rows of the target's head [D, size]."""
    path = job.work / "begin.safetensors"
    if not path.exists():
        token_map = frequent_tokens([text.tokens for text in texts], job.vocabulary, model.vocab_size, stops)
        plain: Any = load_module(job.source, precision="stock" if job.device == "cpu" else "float32", device=job.device)
        rows = plain.get_output_embeddings().weight[token_map.to(job.device)]
        if job.begin is None and job.begin_tokens > 0:
            tell("begin with the target's last layer", None)
            like_the_last_layer(net, Model(job.target, plain).layers[-1], getattr(plain.base_model, "norm", None))
            guess(net, _regression(job, model, texts))
        tensors = {f"net.{name}": value for name, value in net.state_dict().items()}
        save_file(tensors | {"token_map": token_map, "rows": rows.cpu().contiguous()}, path)
    stored = load_file(path)
    token_map, rows = stored.pop("token_map"), stored.pop("rows")
    net.load_state_dict({name.removeprefix("net."): value for name, value in stored.items()})
    net.to(job.device)
    return token_map, rows


def _like(net: FeatureNet, shape: FeatureShape, folder: Path) -> FeatureNet:
    wanted = {name: each.shape for name, each in FeatureNet(shape).named_parameters()}
    if {name: each.shape for name, each in net.named_parameters()} != wanted:
        raise ValueError(f"{folder} is no drafter of this layout for the target, so nothing can go on from it")
    return net.requires_grad_(True)


def _regression(job: Distillation, model: Model, texts: list[Text]) -> Ridge:
    """The target's states before and behind its last layer at every token of the first texts."""
    table = model.module.get_input_embeddings()
    layers, ridge, seen = (model.depth - 1,), Ridge(table.weight.shape[1]), 0
    model.tap(layers)
    for text in texts:
        count = len(text.tokens)
        sequence = TokenBuffer(1, count, model.device)
        sequence.tokens[0, :count] = text.tokens
        sequence.lengths += count
        model.start(1, count)
        model.catch_up(sequence, sequence.lengths)
        entering = model.features(layers, torch.zeros_like(sequence.lengths), count)[0]
        embeds = table(sequence.tokens[0, 1:count])
        ridge.add(embeds, text.features[:-1].to(embeds), entering[1:])
        seen += count
        if seen >= job.begin_tokens:
            break
    return ridge
