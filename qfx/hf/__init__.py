"""qfx as a quantization method of transformers: `QfxConfig` for `from_pretrained`.

Importing this package registers the method. Apart from it, only `qfx.generate` imports
transformers.
"""

try:
    import transformers.core_model_loading  # noqa: F401
except ImportError as why:
    raise ImportError(
        'qfx.hf needs transformers 5 or later: pip install "qfx[hf]" brings it'
    ) from why

from qfx.files.model_state import MAKERS
from qfx.hf import attention_function, experts_function
from qfx.hf.config import QfxConfig
from qfx.hf.kv_cache import KVCache
from qfx.hf.made_buffers import made_buffers
from qfx.hf.quantizer import QfxQuantizer

__all__ = ["KVCache", "QfxConfig", "QfxQuantizer"]

MAKERS.append(made_buffers)
attention_function.register()
experts_function.register()
