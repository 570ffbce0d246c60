"""What every generated module gets besides its guards."""

import re

import pytest
from opslot_patchgen import EntryGuard, NameCollision, Slot, SourceError, TargetGone, UpstreamEscape, read_source

MLP = """\
class TinyMLP(nn.Module):
    def forward(self, x):
        return x
"""
GUARD = EntryGuard(target="TinyMLP.forward", slot=Slot("glu", "swiglu"), result="kernel(x)")
IMPORTS = "from torch import nn\nfrom ...modeling_utils import PreTrainedModel\n"
BASE = "class TinyPreTrainedModel(PreTrainedModel):\n    config: object\n\n\n"


def test_imports_become_absolute_and_ours_follow(generate):
    assert generate(MLP, GUARD).startswith(
        """\
# Copyright upstream.
import torch
from torch import nn

from transformers.activations import ACT2FN
from transformers.modeling_utils import PreTrainedModel
from transformers.models.tiny.configuration_tiny import TinyConfig
from opslot import OpSlot  # opslot
from opslot_models.adoption import no_hub_kernels  # opslot


class TinyPreTrainedModel(PreTrainedModel):
    is_custom_code = classmethod(lambda cls: False)  # opslot
    set_use_kernels = no_hub_kernels  # opslot
    config: TinyConfig
"""
    )


@pytest.mark.parametrize(
    ("relative", "absolute"),
    [
        ("from ... import initialization as init", "from transformers import initialization as init"),
        ("from .. import auto", "from transformers.models import auto"),
        ("from . import configuration_tiny", "from transformers.models.tiny import configuration_tiny"),
        ("from ..auto.modeling_auto import AutoModel", "from transformers.models.auto.modeling_auto import AutoModel"),
    ],
)
def test_import_forms(relative, absolute, generate):
    assert f"\n{absolute}\n" in generate(BASE + MLP, GUARD, frame=f"{IMPORTS}{relative}\n\n\n")


def test_nested_imports_keep_their_scope(generate):
    text = MLP.replace("return x", "if x:\n            from ...utils import (\n                one,\n            )")
    generated = generate(text, GUARD)
    assert "        if x:\n            from transformers.utils import (\n                one,\n" in generated


def test_our_imports_stand_above_the_first_definition(generate):
    generated = generate(f"{MLP}\n\nimport json\n", GUARD)
    assert (
        generated.index("from opslot import") < generated.index("class TinyPreTrainedModel") < generated.index("json")
    )


HEADS = """\
class TinyForSequenceClassification(GenericForSequenceClassification, TinyPreTrainedModel):
    pass


class TinyForQuestionAnswering(GenericForQuestionAnswering, TinyPreTrainedModel):
    base_model_prefix = "transformer"


class TinyForTokenClassification(GenericForTokenClassification, TinyPreTrainedModel): ...
"""


def test_generic_heads_adopt_their_backbone(generate):
    generated = generate(f"{MLP}\n\n{HEADS}", GUARD)
    assert generated.endswith(
        """\
class TinyForSequenceClassification(GenericForSequenceClassification, TinyPreTrainedModel):
    def __init__(self, config):  # opslot
        super().__init__(config)  # opslot
        adopt_backbone(self)  # opslot
    pass


class TinyForQuestionAnswering(GenericForQuestionAnswering, TinyPreTrainedModel):
    def __init__(self, config):  # opslot
        super().__init__(config)  # opslot
        adopt_backbone(self)  # opslot
    base_model_prefix = "transformer"


class TinyForTokenClassification(GenericForTokenClassification, TinyPreTrainedModel): ...
class TinyForTokenClassification(TinyForTokenClassification):  # opslot
    def __init__(self, config):  # opslot
        super().__init__(config)  # opslot
        adopt_backbone(self)  # opslot
"""
    )
    assert "from opslot_models.adoption import adopt_backbone, no_hub_kernels  # opslot\n" in generated


COMPOSED = """\
class TinyModel(TinyPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        language_model = AutoModel.from_config(config=config.text_config)
        self.language_model = language_model
        self.tower = auto.AutoModelForImages._from_config(config.vision_config)
        self.post_init()  # last

    def forward(self, x):
        return x
"""


def test_a_composed_model_adopts_what_automodel_built_before_it_returns(generate):
    generated = generate(f"{MLP}\n\n{COMPOSED}", GUARD)
    assert generated.count("adopt_backbone(self)") == 1
    assert (
        "        self.post_init()  # last\n        adopt_backbone(self)  # opslot\n\n    def forward(self, x):"
        in generated
    )
    assert "import adopt_backbone, no_hub_kernels  # opslot\n" in generated


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        (
            "TinyModel(TinyPreTrainedModel)",
            "TinyModel(nn.Module)",
            UpstreamEscape,
            ":22: AutoModel.from_config builds upstream's classes",
        ),
        ("    def __init__(self, config)", "    def build(self, config)", UpstreamEscape, ":22: AutoModel.from_config"),
        ("        self.post_init()  # last", "        return None", SourceError, ":25: TinyModel.__init__ returns"),
    ],
)
def test_a_composed_model_that_cannot_adopt_is_refused(generate, old, new, error, message):
    with pytest.raises(error, match=re.escape(message)):
        generate(f"{MLP}\n\n{COMPOSED.replace(old, new)}", GUARD)


def test_adopting_heads_run(generate):
    """The three forms of a head, executed with stand-ins for everything that they import."""
    generated = generate(f"{MLP}\n\n{HEADS}", GUARD)
    heads = generated[generated.index("class TinyForSequenceClassification") :]
    adopted = []

    class Base:
        def __init__(self, config):
            self.config = config

    names = dict.fromkeys(re.findall(r"Generic\w+", HEADS), type("Generic", (), {}))
    scope = {**names, "TinyPreTrainedModel": Base, "adopt_backbone": adopted.append}
    exec(heads, scope)
    built = [scope[name]("config") for name in re.findall(r"class (TinyFor\w+)\(Generic", HEADS)]
    assert adopted == built
    assert [type(head).__name__ for head in built] == re.findall(r"class (TinyFor\w+)\(Generic", HEADS)


REFUSALS = {
    "absolute import": ("from transformers.utils import x\n", SourceError, ":3: imports from transformers.utils abs"),
    "odd spacing": (
        "from  ...utils import x\n",
        SourceError,
        ":3: an import that is not written `from ...utils import`",
    ),
    "two imports on a line": ("from .a import b; from .c import d\n", ValueError, ":3: two edits of tiny meet here"),
    "escape": ("a = AutoModel.from_config(1)\n", UpstreamEscape, ":3: AutoModel.from_config builds upstream's classes"),
    "escape of a head": (
        "a = auto.AutoModelForCausalLM.from_pretrained(1)\n",
        UpstreamEscape,
        ":3: auto.AutoModelForC",
    ),
    "OpSlot is taken": ("OpSlot = None\n", NameCollision, ":3: upstream already uses the name `OpSlot`"),
    "is_custom_code is taken": ("is_custom_code = None\n", NameCollision, ":3: upstream already uses the name `is_cus"),
    "set_use_kernels is taken": (
        "set_use_kernels = None\n",
        NameCollision,
        ":3: upstream already uses the name `set_use_k",
    ),
    "not Python": ("a = = b\n", SourceError, "modeling_tiny.py: parser error: error at 3:"),
    "marked already": ("a = b  # opslot\n", SourceError, ":3: already holds an opslot marker"),
    "tab": ("if True:\n\ta = b\n", SourceError, ":4: indented with a tab"),
    "carriage return": ("a = b\r\n", SourceError, ":3: carriage return"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal(case, generate):
    line, error, message = REFUSALS[case]
    with pytest.raises(error, match=re.escape(message)):
        generate(BASE + MLP, GUARD, frame=f"{IMPORTS}{line}\n\n")


def test_a_relative_import_longer_than_needed_cannot_be_undone(generate):
    with pytest.raises(ValueError, match="does not give the source back"):
        generate(BASE + MLP, GUARD, frame=f"{IMPORTS}from ...models.tiny.x import y\n\n\n")


def test_no_pretrained_base_is_refused(generate):
    with pytest.raises(TargetGone, match="no class derives from PreTrainedModel"):
        generate(MLP, GUARD, frame=IMPORTS)


def test_no_import_is_refused(generate):
    with pytest.raises(SourceError, match=":1: no import before the first definition"):
        generate(BASE + MLP, GUARD, frame="")


MODELS = """\
class TinyVisionModel(TinyPreTrainedModel):
    def __init__(self, config):
        self.embeddings = nn.Embedding(2, 2)
        self.layers = nn.ModuleList([])


# Decodes codes of sound.
@auto_docstring(
    custom_intro="TinyTalkerModel"
)
class TinyTalkerModel(TinyPreTrainedModel):
    def __init__(self, config):
        self.codec_embedding = nn.Embedding(2, 2)
        self.layers = nn.ModuleList([])


# Decodes text.
@auto_docstring(
    custom_intro="TinyTextModel"
)
class TinyTextModel(TinyPreTrainedModel):
    def __init__(self, config):
        self.embed_tokens = nn.Embedding(2, 2)
        self.layers = nn.ModuleList([])


class TinyModel(TinyPreTrainedModel):
    def __init__(self, config):
        self.visual = TinyVisionModel._from_config(config)
        self.language_model = TinyTextModel._from_config(config)


class TinyForCausalLM(TinyPreTrainedModel):
    def __init__(self, config):
        self.model = TinyTextModel(config)
        self.lm_head = nn.Linear(2, 2)


class TinyForConditionalGeneration(TinyPreTrainedModel):
    def __init__(self, config):
        self.model = TinyModel._from_config(config)
        self.lm_head = nn.Linear(2, 2)


class TinyTalkerForConditionalGeneration(TinyPreTrainedModel):
    def __init__(self, config):
        self.model = TinyTalkerModel(config)
        self.lm_head = nn.Linear(2, 2)


class TinyForSequenceClassification(TinyPreTrainedModel):
    def __init__(self, config):
        self.model = TinyTextModel(config)
        self.score = nn.Linear(2, 2)
"""


def test_text_models_what_holds_them_and_their_lm_heads_return_auxiliary_states(generate):
    generated = generate(f"{MLP}\n\n{MODELS}", GUARD)
    assert "\nfrom opslot_models.auxiliary import auxiliary_states  # opslot\n" in generated
    decorated = re.findall(r"^@auxiliary_states  # opslot\n(?:(?!class ).*\n)*class (\w+)", generated, re.MULTILINE)
    assert decorated == ["TinyTextModel", "TinyModel", "TinyForCausalLM", "TinyForConditionalGeneration"]
    assert generated.count("@auxiliary_states") == 4
    assert "# Decodes text.\n@auxiliary_states  # opslot\n@auto_docstring(\n" in generated


def test_a_module_without_a_text_model_imports_nothing_for_it(generate):
    assert "auxiliary" not in generate(f"{MLP}\n\n{MODELS.partition('# Decodes text.')[0]}", GUARD)


def test_members_that_upstream_has_already_are_refused(generate):
    with pytest.raises(NameCollision, match=r"already uses the name `supports_eagle3`"):
        generate(f"{MLP}\n\n{MODELS}\n    supports_eagle3 = False\n", GUARD)


def test_head_with_its_own_init_is_refused(generate):
    text = f"{MLP}\n\nclass TinyForX(GenericForX):\n    def __init__(self, config):\n        pass\n"
    with pytest.raises(NameCollision, match=r":19: TinyForX already has an __init__"):
        generate(text, GUARD)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\xef\xbb\xbfimport torch\n", ":1: starts with a byte order mark"),
        (b"import torch", "does not end with a newline"),
        (b"# \xff\n", "not UTF-8"),
    ],
)
def test_bytes_that_are_refused(raw, message, upstream):
    with pytest.raises(SourceError, match=message):
        read_source("transformers.models.tiny.modeling_tiny", upstream(raw))


def test_version_must_be_readable(upstream):
    with pytest.raises(SourceError, match=r"__init__\.py: no line"):
        read_source("transformers.models.tiny.modeling_tiny", upstream("import torch\n", version="unknown"))
