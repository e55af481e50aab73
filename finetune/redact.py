"""Finds and masks secrets: tokens with a known prefix, values next to names such as `api_key`, and URL credentials.

Everything that may reach a log, a report or a script passes through here: errors, run.json, and what `convert` writes.
A secret without a known prefix is only found by the name next to it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

MASK = "***"


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret at text[start:end], and the environment variable from which its service's library reads it."""

    start: int
    end: int
    variable: str


# Format of a service's tokens, and the environment variable that its library reads.
_SHAPES: tuple[tuple[str, str], ...] = (
    (r"(?:api_org|hf)_[A-Za-z0-9]{16,}", "HF_TOKEN"),
    (r"sk-ant-[A-Za-z0-9_-]{16,}", "ANTHROPIC_API_KEY"),
    (r"sk-or-[A-Za-z0-9_-]{16,}", "OPENROUTER_API_KEY"),
    (r"sk-lf-[A-Za-z0-9-]{16,}", "LANGFUSE_SECRET_KEY"),
    (r"sk-(?:proj-|svcacct-|admin-|None-)?[A-Za-z0-9_-]{16,}", "OPENAI_API_KEY"),
    (r"gsk_[A-Za-z0-9]{16,}", "GROQ_API_KEY"),
    (r"nvapi-[A-Za-z0-9_-]{16,}", "NVIDIA_API_KEY"),
    (r"r8_[A-Za-z0-9]{16,}", "REPLICATE_API_TOKEN"),
    (r"xai-[A-Za-z0-9]{16,}", "XAI_API_KEY"),
    (r"pplx-[A-Za-z0-9]{16,}", "PERPLEXITY_API_KEY"),
    (r"fw_[A-Za-z0-9]{20,}", "FIREWORKS_API_KEY"),
    (r"tgp_v1_[A-Za-z0-9_-]{16,}", "TOGETHER_API_KEY"),
    (r"tvly-[A-Za-z0-9_-]{16,}", "TAVILY_API_KEY"),
    (r"lsv2_(?:pt|sk)_[A-Za-z0-9_]{16,}", "LANGSMITH_API_KEY"),
    (r"wandb_v1_[A-Za-z0-9_]{20,}", "WANDB_API_KEY"),
    (r"(?:gh[opsur]|github_pat)_[A-Za-z0-9_]{16,}", "GITHUB_TOKEN"),
    (r"(?:gl(?:pat|dt|ft|rt|cbt|ptt|agent|imt|soat|oas|ffct)-|GR1348941)[A-Za-z0-9_.-]{16,}", "GITLAB_TOKEN"),
    (r"(?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])[A-Z0-9]{16}(?![A-Za-z0-9])", "AWS_ACCESS_KEY_ID"),
    (r"AIza[0-9A-Za-z_-]{30,}", "GOOGLE_API_KEY"),
    (r"ya29\.[0-9A-Za-z_-]{20,}", "GOOGLE_OAUTH_TOKEN"),
    (r"GOCSPX-[0-9A-Za-z_-]{20,}", "GOOGLE_CLIENT_SECRET"),
    (r"(?i:xox[a-z](?:\.xox[a-z])?|xapp)-[0-9A-Za-z-]{10,}", "SLACK_TOKEN"),
    (r"(?i:https://hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/)[\w/+-]{6,}", "SLACK_WEBHOOK_URL"),
    (r"https://(?:\w+\.)?discord(?:app)?\.com/api/webhooks/\d+/[\w-]{16,}", "DISCORD_WEBHOOK_URL"),
    (r"[MNO][A-Za-z0-9_-]{23,25}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,}", "DISCORD_TOKEN"),
    (r"pypi-[A-Za-z0-9_-]{50,}", "PYPI_TOKEN"),
    (r"npm_[A-Za-z0-9]{30,}", "NPM_TOKEN"),
    (r"dckr_[po]at_[A-Za-z0-9_-]{16,}", "DOCKER_TOKEN"),
    (r"dapi[0-9a-f]{32}(?:-\d)?", "DATABRICKS_TOKEN"),
    (r"do[opr]_v1_[0-9a-f]{32,}", "DIGITALOCEAN_TOKEN"),
    (r"hv[sbr]\.[A-Za-z0-9_-]{20,}", "VAULT_TOKEN"),
    (r"(?:[sr]k_(?:live|test|prod)|whsec)_[A-Za-z0-9]{14,}|sk_[A-Za-z0-9]{32,}", "STRIPE_API_KEY"),
    (r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}", "SENDGRID_API_KEY"),
    (r"sq0(?:atp|csp)-[A-Za-z0-9_\\-]{20,}|EAAA[A-Za-z0-9_-]{56,}", "SQUARE_TOKEN"),
    (r"LS0tLS1CRUdJTi[A-Za-z0-9+/=_-]{40,}", "PRIVATE_KEY"),  # `-----BEGIN` in base64, as Kubernetes keeps keys
    (r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{20,}", "SHOPIFY_TOKEN"),
    (r"glsa_[A-Za-z0-9_]{32,}|glc_[A-Za-z0-9+/=]{32,}", "GRAFANA_TOKEN"),
    (r"pul-[0-9a-f]{40}", "PULUMI_ACCESS_TOKEN"),
    (r"lin_(?:api|oauth)_[A-Za-z0-9]{30,}", "LINEAR_API_KEY"),
    (r"(?:ntn|secret)_[A-Za-z0-9]{40,}", "NOTION_TOKEN"),
    (r"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}", "AIRTABLE_TOKEN"),
    (r"pcsk_[A-Za-z0-9_]{20,}", "PINECONE_API_KEY"),
    (r"ATATT3[A-Za-z0-9_=-]{60,}", "ATLASSIAN_TOKEN"),
    (r"NR(?:AK|AA|II|IQ|RA|BR|JS)-[A-Za-z0-9_-]{19,}", "NEW_RELIC_API_KEY"),
    (r"(?:eu01xx)?[0-9a-fA-F]{30,36}NRAL(?![A-Za-z0-9])", "NEW_RELIC_LICENSE_KEY"),
    (r"(?:sntry[su])_[A-Za-z0-9+/=_]{20,}", "SENTRY_AUTH_TOKEN"),
    (r"tfp_[A-Za-z0-9_]{20,}|[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{50,}", "TFE_TOKEN"),
    (r"[0-9]{8,10}:[A-Za-z0-9_-]{34,35}(?![A-Za-z0-9_-])", "TELEGRAM_TOKEN"),
    (r"[0-9a-z]{32}-us[0-9]{1,2}(?![A-Za-z0-9])", "MAILCHIMP_API_KEY"),
    (r"(?:AC|SK)[0-9a-z]{32}(?![A-Za-z0-9])", "TWILIO_API_KEY"),
    (r"AKC[A-Za-z0-9]{10,}|AP[0-9A-F](?=[A-Za-z]*[0-9])[A-Za-z0-9]{30,}", "ARTIFACTORY_API_KEY"),
    (r"https?://api\.softlayer\.com/soap/v3(?:\.1)?/[a-z0-9]{64}", "SOFTLAYER_API_KEY"),
    (r"AGE-SECRET-KEY-1[0-9A-Z]{50,}", "AGE_SECRET_KEY"),
    (r"KGAT_[A-Za-z0-9]{20,}", "KAGGLE_API_TOKEN"),
    # The start alone matches as well, and is none: from `eyJ-eyJ-eyJ-...`, each would look for the rest again.
    (r"eyJ[A-Za-z0-9_-]{8,}+(?:\.eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?|(?P<start>))", "TOKEN"),
    # Any other prefix, followed by a long random sequence of letters and digits.
    (
        r"[A-Za-z][A-Za-z0-9]{1,9}[_-](?:[A-Za-z0-9]{1,8}[_-]){0,2}"
        r"(?=[A-Za-z]*[0-9])(?=[A-Z0-9]*[a-z])(?=[a-z0-9]*[A-Z])[A-Za-z0-9]{32,}(?![A-Za-z0-9/+])",
        "TOKEN",
    ),
)
_START = r"(?<![A-Za-z0-9])"
_SHAPED = [(re.compile(_START + f"(?:{shape})"), variable) for shape, variable in _SHAPES]
_KEY_LINE = r"(?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----"
_PRIVATE_KEY = re.compile(rf"-----BEGIN {_KEY_LINE}(?:.*?-----END {_KEY_LINE}|.*)|PuTTY-User-Key-File-\d:.*", re.DOTALL)
_ADDRESS = re.compile(r"(?<=://)[^/\s@'\"<>{}]{1,300}(?=@)")  # user:password@host, or a token@host
_QUERY = re.compile(
    r"(?<=[?&])(?:[\w-]*(?:token|secret|password|passwd|signature|api_?key)|sig|key)=([^&\s'\"#]{6,})", re.I
)
_ACCOUNT_KEY = re.compile(r"(?:AccountKey|SharedAccessKey|SharedAccessSignature)=([A-Za-z0-9+/=%&-]{16,})", re.I)
_HEADER = re.compile(r"\b(?:bearer|basic|token|bot)\s+(?=[\w./+=~-]*[0-9A-Z])([\w./+=~-]{12,})", re.I)
_WANDB = re.compile(r"(?:wandb|weights\W{1,3}biases)[^\n]{0,60}?(?<![0-9a-fA-F])([0-9a-f]{40})(?![0-9a-fA-F])", re.I)
_AWS = re.compile(r"aws[^\n]{0,20}?(?:key|pwd|pw|password|pass|token)[^\n]{0,20}?['\"]([0-9a-zA-Z/+]{40})['\"]", re.I)
# A name, quoted or as an option, followed by its value: `api_key = "..."`, `'token': ...`, `--password ...`,
# `-u me:...`. Quotes may be escaped, as for JSON inside a string.
_NAMED = re.compile(
    r"(?P<option>(?<!\S)--?[A-Za-z][\w.-]{0,80}+)\s++"
    r"|(?P<name>[A-Za-z_][\w.-]{0,80}+)\\{0,3}['\"]?\]?\s{0,9}(?=[:=])"
)
_VALUE = r"(?:(?P<quote>\\{0,3}['\"])(?P<quoted>(?:(?!(?P=quote))[^\n])+)(?P=quote)|(?P<bare>[^\s'\",;(){}\[\]<>`]++))"
_AFTER_OPTION = re.compile(_VALUE)
_AFTER_NAME = re.compile(r"(?:(?::\s{0,9}[\w.\[\], |]{1,30}?)?=(?!=)|:(?![:/]))\s{0,9}" + _VALUE)
_MAX_WORD = 1_000  # characters of an unquoted value that may be a word or an expression, and no secret
_CURL_USER = re.compile(r"\bcurl\b[^\n]{0,300}?\s(?:-u|--user)\s*['\"]?[^\s:'\"]{1,100}:([^\s'\"]+)")

_STRONG = re.compile(
    r"(?:^|[_.-])(?:(?:pass|pass_?phrase|passwd|pwd|password|credentials?|secrets?|secret_(?:access_)?key|client_secret"
    r"|authorization|x_api_key|api_?keys?|api_?token|auth(?:_key)?_?token|access_?(?:key|token)(?:_id|_secret)?"
    r"|private_?key|account_?key|service_?key|encryption_?key|signing_?key|refresh_token|id_token|session_token"
    r"|bearer_token|webhook(?:_url)?|dsn)|(?:hf|hub|huggingface|wandb|openai|anthropic|groq|gemini|google|cohere"
    r"|mistral|github|gitlab|kaggle|replicate|together|nvidia|ngc|comet|neptune|ngrok|slack|telegram|bot|discord|aws"
    r"|azure|read|write|my|user|personal|pat|login|secret|api|auth|access|use_auth)_?(?:token|key|secret|pat))$",
    re.IGNORECASE,
)
_PASSWORD = re.compile(r"(?:pass|pass_?phrase|passwd|pwd|password)$", re.IGNORECASE)
_TOKENIZER_WORDS = frozenset(
    "pad eos bos unk sep cls mask special end start stop eot eom eod begin first last next new image img audio video"
    " vision user assistant system tool think prompt per max min num added extra additional decoder forced prefix"
    " suffix middle separator space blank newline response answer question query input output instruction context"
    " split join delimiter boundary sentinel human speaker turn thought thinking reasoning solution label class".split()
)
_MAX_SEARCHED = 200_000  # leading characters of a text that are searched for names


def is_secret_name(name: str) -> bool:
    """Whether a variable, key, option or header of this name holds a secret: `api_key`, `HF_TOKEN`, `X_SERVICE_KEY`,
    `--hub-token`, `Authorization`; not `pad_token`, `max_new_tokens` or `text_key`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip("-_ ")).replace("-", "_").rpartition(".")[2]
    lower = words.lower()
    before, _, last = lower.rpartition("_")
    if last == "token":
        return before.rpartition("_")[2] not in _TOKENIZER_WORDS
    if _STRONG.search(lower):
        return True
    upper = words.isupper() and before != ""
    return upper and last in ("key", "secret", "pass", "pw", "cred", "creds", "pat")


def variable_for(name: str) -> str:
    """The environment variable for a secret that is called `name` in code."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2].strip("-_ "))
    variable = re.sub(r"\W+", "_", words).strip("_").upper()
    known = {"token", "hf_token", "use_auth_token", "hub_token", "hugging_face_token", "huggingface_token"}
    if variable.lower() in known:
        return "HF_TOKEN"
    return "SECRET" if not variable or variable[0].isdigit() else variable


def find_by_format(text: str) -> Iterator[Secret]:
    """Secrets with a known format, anywhere in the text: tokens of services, private keys and credentials in URLs. They
    may overlap."""
    for pattern, variable in _SHAPED:
        for match in pattern.finditer(text):
            if match.lastgroup != "start" and not is_placeholder(match.group()):
                yield Secret(*match.span(), variable)
    for match in _PRIVATE_KEY.finditer(text):
        yield Secret(*match.span(), "PRIVATE_KEY")
    for pattern, variable, group in (
        (_ADDRESS, "URL_CREDENTIALS", 0),
        (_QUERY, "URL_TOKEN", 1),
        (_ACCOUNT_KEY, "ACCOUNT_KEY", 1),
        (_HEADER, "AUTHORIZATION_TOKEN", 1),
        (_WANDB, "WANDB_API_KEY", 1),
        (_AWS, "AWS_SECRET_ACCESS_KEY", 1),
    ):
        for match in pattern.finditer(text):
            if not is_placeholder(match.group(group)):
                yield Secret(*match.span(group), variable)


def find_secrets(text: str) -> list[Secret]:
    """All secrets in a text, in order and without overlap: by their format, and values next to secret names."""
    found = list(find_by_format(text))
    found += _find_by_name(text[:_MAX_SEARCHED])
    found += [Secret(*match.span(1), "PASSWORD") for match in _CURL_USER.finditer(text[:_MAX_SEARCHED])]
    return merge(found)


def _find_by_name(text: str) -> Iterator[Secret]:
    """Values next to secret names. Linear: a value is only read after such a name, and one that is longer than
    `_MAX_WORD` is masked, so that it is not read again from each name in it."""
    position = 0
    while match := _NAMED.search(text, position):
        name, follows = match["option"] or match["name"], _AFTER_OPTION if match["option"] else _AFTER_NAME
        value = follows.match(text, match.end()) if is_secret_name(name) else None
        group = "bare" if value is None or value["quoted"] is None else "quoted"
        is_long = value is not None and group == "bare" and len(value[group]) > _MAX_WORD
        if value is not None and (is_long or holds_secret(name, value[group], quoted=group == "quoted")):
            yield Secret(*value.span(group), variable_for(name))
            position = value.end()
        else:  # the apparent value may be the next name: `-x TOKEN=...`
            position = match.start("option") + 1 if match["option"] else match.end("name")


def merge(found: list[Secret]) -> list[Secret]:
    """The secrets in order, with overlapping ones merged under the variable of the first."""
    kept: list[Secret] = []
    for item in sorted(found, key=lambda item: (item.start, -item.end)):
        if kept and item.start < kept[-1].end:
            kept[-1] = Secret(kept[-1].start, max(kept[-1].end, item.end), kept[-1].variable)
        else:
            kept.append(item)
    return kept


def holds_secret(name: str, value: str, *, quoted: bool = True) -> bool:
    """Whether `name` is the name of a secret and `value` may be one: not a placeholder, a special token of a tokenizer
    or a number, and, if unquoted, not an expression or a plain word."""
    if not is_secret_name(name) or not is_credible(value):
        return False
    if not quoted:
        is_expression = re.search(r"^\$|environ|getenv|\.get\b|os\.|input\(|userdata", value)
        if _PASSWORD.search(name) and re.fullmatch(r"[A-Za-z]+(?:-[A-Za-z]+){2,}", value):  # correct-horse-battery
            return True
        return len(value) >= 6 and not is_expression and bool(re.search(r"\d", value) and re.search("[A-Za-z]", value))
    if _STRONG.search(name):
        return True
    if re.search("token$", name, re.IGNORECASE):  # CHAT_TOKEN = "### Assistant:"
        return not re.search(r"[\s#<>{}\[\]|]|:$", value)
    # LABEL_KEY = "answer", INSTRUCTION_KEY = "### Instruction: ..."
    return not re.search(r"\s", value) and not is_words(value) and (bool(re.search(r"\d", value)) or len(value) >= 20)


def is_words(value: str) -> bool:
    """Whether a value consists of words and small numbers, as names of columns and data do: `answer_text_v2`."""
    part = r"(?:[a-z]{1,14}|[A-Z][a-z]{0,13}|[A-Z]{1,14}|[A-Za-z]?\d{1,3}[A-Za-z]?)"
    return bool(re.fullmatch(f"{part}(?:[_./-]{part})*", value)) and bool(re.search(r"[_./-]", value))


def is_credible(value: str) -> bool:
    """Whether a value next to a secret name may be a secret."""
    no_secret = r"[<\[(].*[>\])]|[\d.,_-]+|(?i:none|null|true|false)"
    return len(value) >= 4 and not is_placeholder(value) and not re.fullmatch(no_secret, value)


def is_placeholder(value: str) -> bool:
    """Whether a value only stands in for a secret: `YOUR_HF_TOKEN`, `hf_...`, `<token>`, `***`."""
    return bool(re.search(r"your|_here|\.\.\.|…|x{4}|\*{3}|<\w+>|\$\{|example\.com$|changeme|placeholder", value, re.I))


@functools.lru_cache(maxsize=1024)  # run.json is written many times with the same words
def redact(text: str, mask: str = MASK) -> str:
    """The text with every secret in it replaced by `mask`."""
    parts, last = [], 0
    for item in find_secrets(text):
        parts += [text[last : item.start], mask]
        last = item.end
    return "".join([*parts, text[last:]])


def redact_arguments(arguments: Iterable[str]) -> list[str]:
    """Command-line arguments, with secrets and the values of options with secret names masked."""
    shown: list[str] = []
    option = ""  # to which the next word belongs
    for word in arguments:
        name, equals, _ = word.partition("=")
        if option and is_secret_name(option) and not word.startswith("--"):
            shown.append(MASK)
        elif equals and name.startswith("-") and is_secret_name(name):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(redact(word))
        option = word if word.startswith("-") and not equals else ""
    return shown


def redact_tree(value: object) -> Any:
    """Nested dicts and lists with every string redacted and the values of secret names masked."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {
            key: MASK if isinstance(item, str) and item and is_secret_name(str(key)) else redact_tree(item)
            for key, item in value.items()
        }
    return [redact_tree(item) for item in value] if isinstance(value, list | tuple) else value
