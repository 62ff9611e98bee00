from trainer.checkpoints.checkpoints import copy_model_files


def test_everything_but_the_weights_is_copied(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    small = ["config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt", "README.md"]
    weights = ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "weights.pt", ".hidden"]
    for name in [*small, *weights]:
        (source / name).write_text(name)
    (source / "folder").mkdir()
    copy_model_files(source, target)
    assert sorted(path.name for path in target.iterdir()) == sorted(small)
    assert all((target / name).read_text() == name for name in small)


def test_a_huge_file_is_not_a_tokenizer(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    with (source / "dataset.json").open("wb") as file:
        file.truncate(65 << 20)
    copy_model_files(source, target)
    assert list(target.iterdir()) == []
