"""Splices opslot guards into transformers modeling source. Needs neither torch, nor transformers, nor opslot."""

from opslot_patchgen._artifact import Artifact as Artifact
from opslot_patchgen._artifact import build as build
from opslot_patchgen._check import stale as stale
from opslot_patchgen._errors import AmbiguousTarget as AmbiguousTarget
from opslot_patchgen._errors import InverseError as InverseError
from opslot_patchgen._errors import NameCollision as NameCollision
from opslot_patchgen._errors import PatchgenError as PatchgenError
from opslot_patchgen._errors import SourceError as SourceError
from opslot_patchgen._errors import SpecError as SpecError
from opslot_patchgen._errors import TargetGone as TargetGone
from opslot_patchgen._errors import UnreachableGuard as UnreachableGuard
from opslot_patchgen._errors import UpstreamEscape as UpstreamEscape
from opslot_patchgen._inverse import restore as restore
from opslot_patchgen._plan import Plan as Plan
from opslot_patchgen._plan import plan as plan
from opslot_patchgen._source import Source as Source
from opslot_patchgen._source import read_source as read_source
from opslot_patchgen._spec import CallGuard as CallGuard
from opslot_patchgen._spec import EntryGuard as EntryGuard
from opslot_patchgen._spec import ForwardGuard as ForwardGuard
from opslot_patchgen._spec import Guard as Guard
from opslot_patchgen._spec import ModelSpec as ModelSpec
from opslot_patchgen._spec import RegionGuard as RegionGuard
from opslot_patchgen._spec import Slot as Slot
from opslot_patchgen._specs import SpecPackage as SpecPackage
from opslot_patchgen._specs import load_specs as load_specs
