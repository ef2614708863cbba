import json
import pytest
from checkpoints import hf_config, write_checkpoint
from trtllm_world import trtllm_double
from trtllm_treewy.export.trtllm.convert import convert_checkpoint
from trtllm_treewy.export import trtllm_build

def test_x(tmp_path, monkeypatch):
    raw = hf_config(vocab_size=96)
    write_checkpoint(tmp_path / "hf", raw)
    convert_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    lib = tmp_path / "libtreewy_tensorrt.so"; lib.write_bytes(b"")
    with trtllm_double(monkeypatch):
        from trtllm_treewy.export.trtllm import contract
        print([str(f) for f in contract.check() if f.problem])
        trtllm_build.run(["--checkpoint_dir", str(tmp_path/"ckpt"), "--output_dir", str(tmp_path/"engine"), "--treewy_library", str(lib), "--max_batch_size", "3", "--max_seq_len", "64"])
        print(sorted(p.name for p in (tmp_path/"engine").iterdir()))
        from tensorrt_llm.builder import built
        print(list(built[0].inputs), list(built[0].outputs))
