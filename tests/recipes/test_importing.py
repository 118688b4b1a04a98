"""Importing published models: against a NumPy Llama of its own, against stored results of transformers, and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxml import trees
from jaxml.checkpoint.compare import describe
from jaxml.checkpoint.probe import probe_tokens
from jaxml.config.spec import from_json
from jaxml.errors import CheckpointError, JaxmlError
from jaxml.infer.opening import Opened, open_checkpoint, probe_logits
from jaxml.models.spec import DecoderSpec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.recipes.assemble import assemble
from jaxml.recipes.imported import ImportedModel
from jaxml.recipes.importing import import_model
from jaxml.recipes.saving import initial_params
from tests.models.families.tiny import CONFIG, VARIANTS, random_tensors, write
from tests.reference import llama
from tests.tiny import tiny_experiment

STORIES = "stories260k-hf"


def full_logits(opened: Opened, ids: list[int]) -> np.ndarray:
    """[T, V] by the full forward pass."""
    tokens = jnp.asarray([ids], jnp.int32)

    def run(params):
        module = opened.bound.bind(params)
        features, _ = module(tokens, jnp.arange(len(ids), dtype=jnp.int32)[None], jnp.ones_like(tokens))
        return module.logits(features)[0]

    return np.asarray(jax.jit(run)(opened.params))


@pytest.fixture(scope="module")
def stories(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Opened, dict]:
    """The trained 260K-parameter Llama, imported and opened, and what transformers computes with it."""
    out = tmp_path_factory.mktemp("stories") / "checkpoint"
    report = import_model(assets / STORIES, out)
    assert (report.parameters, report.num_leaves, report.num_tensors) == ({"float32": 260_032}, 11, 47)
    assert report.tokenizer.startswith("512 ids, bos 1, eos 2, ")
    assert report.unused == () and report.notes == ()
    return open_checkpoint(out), json.loads((assets / STORIES / "reference.json").read_text())


def test_trained_weights_give_the_reference_logits_and_all_199_greedy_tokens(stories):
    opened, reference = stories
    ids = reference["greedy_ids_from_bos_200"]
    assert ids[:5] == reference["prompt_ids"]
    logits = full_logits(opened, ids)
    assert np.abs(logits[4, :16] - reference["last_logits_first16"]).max() < 1e-4  # 6e-6 when this was written
    assert logits[:5].argmax(-1).tolist() == reference["argmax_per_position"]
    assert logits[:-1].argmax(-1).tolist() == ids[1:]


def test_the_imported_tokenizer_gives_the_reference_ids(stories):
    opened, reference = stories
    assert len(reference["tokenizer_cases"]) == 7
    for case in reference["tokenizer_cases"]:
        assert opened.tokenizer.encode(case["text"]) == case["ids"]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_random_model_gives_the_logits_of_numpy_on_its_published_tensors(tmp_path, name):
    config = CONFIG | VARIANTS[name]
    published = random_tensors(config)
    num_shards = 1 + list(VARIANTS).index(name)
    import_model(write(tmp_path / "hf", config, published, num_shards), tmp_path / "out")
    logits = probe_logits(open_checkpoint(tmp_path / "out"))
    rows = probe_tokens(config["vocab_size"], config["max_position_embeddings"])
    for row, got in zip(rows, logits, strict=True):
        expected = llama.logits(config, published, row.tolist())
        assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("dtypes", "stored"),
    [([ml_dtypes.bfloat16], "bfloat16"), ([np.float16], "float32"), ([ml_dtypes.bfloat16, np.float16], "float32")],
)
def test_half_precision_is_stored_without_loss(tmp_path, dtypes, stored):
    published = random_tensors(CONFIG)
    published = {name: value.astype(dtypes[i % len(dtypes)]) for i, (name, value) in enumerate(published.items())}
    report = import_model(write(tmp_path / "hf", CONFIG, published), tmp_path / "out")
    assert report.stored_as == stored
    assert set(report.parameters) == {np.dtype(dtype).name for dtype in dtypes}
    opened = open_checkpoint(tmp_path / "out")
    table = opened.params["embed"]["table"]
    assert table.dtype == stored
    exact = published["model.embed_tokens.weight"].astype(np.float32)
    assert np.array_equal(np.asarray(table).astype(np.float32), exact)


def test_the_manifest_says_what_was_imported_and_names_no_place_on_this_machine(tmp_path):
    write(tmp_path / "secret-place" / "small-llama", CONFIG, random_tensors(CONFIG))
    import_model(tmp_path / "secret-place" / "small-llama", tmp_path / "out")
    found = describe(tmp_path / "out")
    assert (found.step, found.parts["params"].num_leaves) == (0, 11)
    assert "secret-place" not in json.dumps(found.to_json()["manifest"])
    model = from_json(found.manifest.experiment)
    assert isinstance(model, ImportedModel)
    assert (model.name, model.source, model.family) == ("small-llama", "small-llama", "llama")
    assert isinstance(model.model, DecoderSpec)
    assert model.precision == PrecisionSpec(compute="float32")


def test_a_run_can_start_from_an_imported_model(tmp_path):
    config = CONFIG | {"vocab_size": 257, "max_position_embeddings": 16}
    import_model(write(tmp_path / "hf", config, random_tensors(config)), tmp_path / "out")
    opened = open_checkpoint(tmp_path / "out")
    assembly = assemble(dataclasses.replace(tiny_experiment(tmp_path), model=opened.model))
    assert trees.compare(opened.params, initial_params(assembly, str(tmp_path / "out"))) == []


def test_a_second_copy_of_a_tied_head_is_listed_if_it_is_equal_and_refused_if_not(tmp_path):
    published = random_tensors(CONFIG)
    copies = {"lm_head.weight": published["model.embed_tokens.weight"].copy()}
    copies["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    report = import_model(write(tmp_path / "hf", CONFIG, published | copies), tmp_path / "out")
    assert report.unused == tuple(sorted(copies))
    copies["lm_head.weight"][0, 0] += 1
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight"):
        import_model(write(tmp_path / "other", CONFIG, published | copies), tmp_path / "not")


def broken(kind: str, place: Path) -> None:
    """A directory that has one thing wrong."""
    config, published = dict(CONFIG), random_tensors(CONFIG)
    match kind:
        case "no model type":
            del config["model_type"]
        case "another family":
            config["model_type"] = "mamba"
        case "a model type that is no text":
            config["model_type"] = ["llama"]
        case "more layers than tensors":
            config["num_hidden_layers"] = 10**12
        case "heads that do not divide":
            config["num_key_value_heads"] = 3
            published = random_tensors(config)
        case "a missing tensor":
            del published["model.norm.weight"]
        case "NaN weights":
            published["model.layers.1.mlp.up_proj.weight"][3, 3] = np.nan
    write(place, config, published)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("no model type", "model_type"),
        ("another family", "model_type"),
        ("a model type that is no text", "model_type"),
        ("more layers than tensors", "number of layers"),
        ("heads that do not divide", "num_kv_heads"),
        ("a missing tensor", r"tensor model\.norm\.weight"),
        ("NaN weights", r"tensor model\.layers\.1\.mlp\.up_proj\.weight"),
    ],
)
def test_what_is_not_a_whole_llama_is_refused_by_name_and_nothing_is_written(tmp_path, kind, named):
    broken(kind, tmp_path / "hf")
    with pytest.raises(JaxmlError, match=named):
        import_model(tmp_path / "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(tmp_path, assets):
    write(tmp_path / "hf", CONFIG, random_tensors(CONFIG))
    (tmp_path / "hf" / "tokenizer.json").write_bytes((assets / STORIES / "tokenizer.json").read_bytes())
    with pytest.raises(CheckpointError, match="ids up to 511"):
        import_model(tmp_path / "hf", tmp_path / "out")


def test_a_directory_that_is_not_empty_is_not_written_to(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    with pytest.raises(CheckpointError, match="files in it"):
        import_model(tmp_path / "hf", tmp_path / "out")
    with pytest.raises(CheckpointError, match="a file"):
        import_model(tmp_path / "hf", tmp_path / "out" / "precious")
