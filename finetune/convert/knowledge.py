"""What the converter knows about libraries: what a call does (`CALLS`). Arguments: finetune/config/arguments.py.

A new method, package or argument is a word in one row. What a row means is decided where its kind is used.
docs/notebook-rules.md has both tables (`make docs`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

# --- calls ------------------------------------------------------------------------------------------------------------

# How each kind is compared with a call, and what it means. A kind of "method" is compared with the last part of the
# call's name; of "package" with its first part; of "name" with all of it, where `*` is anything and `x.*` includes `x`.
KINDS: dict[str, tuple[str, str]] = {
    "looks": ("method", "computes: left out if its value is unused"),
    "mutates": ("method", "changes its receiver, even if its value is used"),
    "fills": ("method", "changes a list, dict, set or counter, and nothing else"),
    "casts": ("method", "changes a module in place"),
    "prints": ("method", "does not change its arguments"),
    "writes": ("method", "writes the file or folder that it is given"),
    "saves": ("method", "saves the model"),
    "exports": ("method", "kept, after training, on the main rank"),
    "on every rank": ("method", "runs on every rank, because it communicates"),
    "moves": ("method", "moves the model or sets its mode"),
    "runs text": ("method", "runs text as code"),
    "computes": ("package", "known, so no module of the notebook's own repository"),
    "shows": ("package", "draws or measures, and need not be installed: left out if nothing needs its value"),
    "configured": ("package", "setting its attributes changes the training"),
    "installed": ("package", "a run may import it, so no script may have its name"),
    "account": ("name", "an account or tracker: left out"),
    "fetches": ("name", "downloads data of its package: kept, once per machine, if the script uses the package"),
    "secret": ("name", "reads a secret: `os.environ.get`"),
    "service": ("name", "a service or server: refused if the rows depend on it"),
    "other model": ("name", "loads or runs a model: refused if the rows depend on it"),
    "process": ("name", "starts a process"),
    "seeds": ("name", "seeds the generators of these packages"),
    "sets library": ("name", "sets an option of the process, which no value depends on"),
    "unsafe": ("name", "refused: it cannot run on several ranks"),
    "left to you": ("name", "left out, with a note"),
    "another trainer": ("name", "refused: R1"),
    "another head": ("name", "refused if no other model is loaded: R1"),
    "encoder-decoder": ("name", "refused: R1"),
    "images": (
        "name",
        "refused if the training uses it: R3, or a model for text if there is a tokenizer, no processor and no images",
    ),
    "audio": ("name", "refused if the training uses it: R3"),
}


@dataclass(frozen=True, slots=True)
class Call:
    """Names separated by spaces, their kinds separated by commas, and a reason for the report or a remedy."""

    names: str
    kinds: str
    reason: str = ""


_REPOSITORY = "install the modules of the repository as a package, or copy the code into a cell"
_PUBLISH = "publish the finished folder with `hf upload`"

CALLS = (
    # Methods and functions, by the last part of their name.
    Call(
        "apply_chat_template batch_decode convert_tokens_to_ids corr count cpu decode describe encode filter get"
        " get_input_embeddings get_memory_footprint get_nb_trainable_parameters get_output_embeddings get_vocab head"
        " idxmin isnull items keys max mean median min mode modules named_modules named_parameters nlargest notnull"
        " nsmallest num_parameters nunique parameters parse_response quantile remove_columns rename_column sample"
        " select show state_dict std sum tail take to_dict to_pandas tokenize train_test_split unique value_counts"
        " values var",
        "looks",
    ),
    Call("debug display generate info len pprint print warning", "prints"),
    Call("appendleft subtract", "fills"),
    Call("add append clear discard extend insert pop popitem remove reverse setdefault sort update", "fills, mutates"),
    Call(
        "add_callback add_faiss_index add_special_tokens add_tokens enable_input_require_grads"
        " gradient_checkpointing_enable mount pop_callback remove_callback resize_token_embeddings seed set_format"
        " shuffle_ with_format_",
        "mutates",
    ),
    Call("bfloat16 double float half requires_grad_ type", "casts"),
    Call("to", "casts, moves"),
    Call("cuda for_training", "moves"),
    Call("for_inference", "moves, prints"),
    Call("train", "moves"),
    Call("eval", "moves, runs text"),
    Call("evaluate", "on every rank"),
    Call("save_pretrained", "saves"),
    Call("save_model", "saves, prints, on every rank"),
    Call("save_state", "saves, on every rank"),
    Call(
        "merge_and_unload push_to_hub push_to_hub_ggml push_to_hub_gguf push_to_hub_merged push_to_hub_openvino"
        " push_to_hub_torchao save_lora save_pretrained_ggml save_pretrained_gguf save_pretrained_merged"
        " save_pretrained_openvino save_pretrained_torchao unsloth_save_model",
        "exports",
    ),
    Call("dump_jsonl save_to_disk savez to_csv to_excel to_json to_parquet to_pickle write_bytes write_text", "writes"),
    Call("__import__ compile exec globals", "runs text"),
    # Packages.
    Call("torch transformers unsloth bitsandbytes", "computes, configured, installed"),
    Call("unsloth_zoo", "configured, installed"),
    Call(
        "accelerate datasets huggingface_hub numpy packaging pandas peft psutil requests rich tqdm triton trl xformers",
        "computes, installed",
    ),
    Call(
        "PIL altair bokeh evaluate ipywidgets librosa matplotlib plotly prettytable seaborn sklearn soundfile tabulate"
        " torchaudio wordcloud",
        "computes, shows",
    ),
    Call("box easydict json math ml_collections munch omegaconf os pathlib re string textwrap types", "computes"),
    Call("yaml", "installed"),
    Call(
        "GPUtil IPython collections copy dataclasses datetime dotenv enum functools gc google importlib inspect"
        " itertools kaggle_secrets locale logging nvidia_smi platform pprint pynvml random scipy sys"
        " time typing urllib warnings",
        "computes",
    ),
    Call(
        "filelock finetune fsspec jinja2 patches pyarrow regex ruff safetensors sympy tensorboard tokenizers",
        "installed",
    ),
    # Full names.
    Call(
        "wandb.login wandb.init wandb.finish wandb.log wandb.config* wandb.Settings huggingface_hub.login"
        " huggingface_hub.notebook_login huggingface_hub.interpreter_login huggingface_hub.HfFolder*"
        " huggingface_hub.get_token huggingface_hub.whoami google.colab.?* kaggle_secrets.?* dotenv.load_dotenv"
        " mlflow.?* comet_ml.?* trackio.?* login notebook_login getpass.getpass neptune.?*",
        "account",
    ),
    Call("nltk.download nltk.downloader.download stanza.download spacy.cli.download", "fetches"),
    Call("google.colab.userdata.get kaggle_secrets.*get_secret *.get_secret", "secret"),
    Call(
        "openai.* anthropic.* groq.* cohere.* mistralai.* litellm.* ollama.* together.* google.generativeai.*"
        " google.genai.* vllm.* distilabel.* requests.post.* huggingface_hub.InferenceClient.*",
        "service",
    ),
    Call(
        "*AutoModel*.from_pretrained *Fast*Model.from_pretrained transformers.pipeline SentenceTransformer"
        " *.SentenceTransformer",
        "other model",
    ),
    Call(
        "subprocess.run subprocess.call subprocess.check_call subprocess.check_output subprocess.Popen"
        " subprocess.getoutput",
        "process",
    ),
    Call("os.system os.popen", "process"),
    Call("set_seed seed_everything", "seeds", "random numpy torch"),
    Call("random.seed", "seeds", "random"),
    Call("numpy.random.seed", "seeds", "numpy"),
    Call("torch.manual_seed", "seeds", "torch"),
    Call(
        "torch.set_float32_matmul_precision* torch.use_deterministic_algorithms* torch._dynamo.?* torch.backends.?*",
        "sets library",
    ),
    Call("torch.nn.DataParallel", "unsafe", "remove it: the launcher starts one process per GPU"),
    Call("torch.nn.parallel.DistributedDataParallel", "unsafe", "remove it: the trainer wraps the model"),
    Call("torch.distributed.init_process_group", "unsafe", "remove it: the trainer connects the processes"),
    Call("accelerate.notebook_launcher", "unsafe", "call the function directly: the launcher starts the processes"),
    Call("unsloth.dataprep.SyntheticDataKit", "unsafe", "run it once, and load the rows that it wrote from a file"),
    Call("torch.compile", "unsafe", "pass torch_compile=True to SFTConfig instead"),
    Call("sys.path.append sys.path.insert", "unsafe", _REPOSITORY),
    Call("os.chdir", "unsafe, left to you", "start the script in that folder"),
    Call("google.colab.files.upload", "left to you", "put the files next to the script"),
    Call(
        "GRPOTrainer DPOTrainer ORPOTrainer KTOTrainer PPOTrainer PPOv2Trainer CPOTrainer RLOOTrainer RewardTrainer"
        " XPOTrainer OnlineDPOTrainer NashMDTrainer GKDTrainer BCOTrainer AlignPropTrainer IterativeSFTTrainer"
        " PRMTrainer SDFTTrainer GOLDTrainer",
        "another trainer",
    ),
    Call(
        "*Seq2SeqLM *T5For* UMT5For* T5Gemma*For* *BartFor* LEDFor* *PegasusFor* PegasusXFor* Blenderbot*For* FSMTFor*"
        " M2M100For* NllbMoeFor* ProphetNetFor* MvpFor* SwitchTransformersFor* MarianMTModel EncoderDecoderModel",
        "encoder-decoder",
    ),
    Call(
        "*ForSequenceClassification *ForTokenClassification *ForQuestionAnswering *ForMaskedLM *ForMultipleChoice",
        "another head",
    ),
    Call(
        "snac SNAC BiCodec* XCodec2* xcodec2 CsmForConditionalGeneration Whisper?* torchaudio librosa AudioSeal"
        " sampling_rate AutoModelForSpeechSeq2Seq AutoModelForCTC",
        "audio",
    ),
    Call(
        "FastVisionModel UnslothVisionDataCollator AutoModelForVision2Seq AutoModelForImageTextToText"
        " process_vision_info AutoModelForMultimodalLM ?*ForConditionalGeneration",
        "images",
    ),
)


def _rows(kind: str) -> Iterator[tuple[str, str]]:
    if kind not in KINDS:
        raise KeyError(f"no such kind of call: {kind}")
    for row in CALLS:
        if kind in row.kinds.split(", "):
            yield from ((name, row.reason) for name in row.names.split())


@cache
def named(kind: str) -> frozenset[str]:
    """The names of a kind that is compared with the last or the first part of a call's name."""
    return frozenset(name for name, _ in _rows(kind))


@cache
def explained(kind: str) -> dict[str, str]:
    """Name -> reason, for a kind whose rows give one."""
    return dict(_rows(kind))


@cache
def _pattern(kind: str) -> re.Pattern[str]:
    return re.compile("|".join(_expression(name) for name, _ in _rows(kind)))


def _expression(name: str) -> str:
    inside = name.endswith(".*")  # the name itself, or anything in it
    text = re.escape(name.removesuffix(".*") if inside else name).replace(r"\*", ".*").replace(r"\?", ".")
    return text + (r"(?:\..*)?" if inside else "")


def matches(kind: str, dotted: str) -> bool:
    """Whether a call's full name is of a kind that is compared with all of it."""
    return _pattern(kind).fullmatch(dotted) is not None


@cache
def known_packages() -> frozenset[str]:
    """Top-level names of packages that a notebook may import."""
    dotted = {
        name.split(".")[0]
        for kind in ("service", "account", "fetches", "other model")
        for name, _ in _rows(kind)
        if "." in name
    }
    names = named("computes") | named("shows") | named("configured") | named("installed") | dotted
    return frozenset(name for name in names if name.isidentifier()) - {"config"}
