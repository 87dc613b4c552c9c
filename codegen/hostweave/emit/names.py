"""Names in generated C++. A user's name changes only if C++ or the generated program reserves it, or if another name has this C++ name."""

import errno
import re
from collections import Counter
from collections.abc import Container, Iterable

from hostweave.analysis.def_use import def_use
from hostweave.host_ir import ir, tree

_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class co_await co_return
co_yield compl concept const const_cast consteval constexpr constinit continue decltype default delete do double dynamic_cast else
enum explicit export extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr
operator or or_eq private protected public register reinterpret_cast requires restrict return short signed sizeof static static_assert
static_cast struct switch template this thread_local throw true try typedef typeid typename union unsigned using virtual void
volatile wchar_t while xor xor_eq
"""
# Names that templates and emitters declare, or call without a qualifier.
_USED = """
hw std programs Program Inputs Outputs OutputShapes Sizes kMesh kWorld in out caller stream sizes shapes memory guard range check compute
prepare take_over run enqueue arena
int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t size_t blockIdx blockDim threadIdx gridDim warpSize source target kSources
kTargets Row Index kWidth sample user_kernels kAxes kRanks kChannels
"""
# Macros of the included headers, functions of libraries such as CUDA, and numbered names of the templates.
_MACROS = re.compile(
    r"""(?:ADJ|ATOMIC|BC|CLOCK|CLONE|CPU|CU|FD|FP|HUGE_VAL|LC|MATH|MOD|NL|NV|PTHREAD|SCHED|SEEK|STA|TIMER)_[A-Z0-9_]+[a-z]?
    | (?:CUBLAS|CUDA|HOSTWEAVE|HW_|NCCL|SNAN|SYS_|hw_|pthread_)\w*
    | (?:cublas|cuda|nccl|pnccl)[A-Z]\w*
    | k(?:Axes|Ranks)\d+
    | [A-Z0-9_]+_(?:C|FILENO|INITIALIZER|MAX|MIN|OK|WIDTH|VALF?L?)
    | M_(?:1_PI|2_PI|2_SQRTPI|E|LN2|LN10|LOG2E|LOG10E|PI|PI_2|PI_4|SQRT1_2|SQRT2)(?:l|f\d*x?)?""",
    re.VERBOSE,
)
_OTHER_MACROS = """
BIG_ENDIAN BUFSIZ BYTE_ORDER CHAR_BIT CLOCKS_PER_SEC CLOSE_RANGE_CLOEXEC CLOSE_RANGE_UNSHARE CSIGNAL EOF EXIT_FAILURE EXIT_SUCCESS F_LOCK
F_TEST F_TLOCK F_ULOCK IF_DEVICE_OR_CUDACC INFINITY LITTLE_ENDIAN LONG_BIT L_INCR L_SET L_XTND L_ctermid L_cuserid L_tmpnam MAXFLOAT
MAX_CANON MAX_INPUT NAN NFDBITS NULL NZERO PDP_ENDIAN PIPE_BUF P_tmpdir RENAME_EXCHANGE RENAME_NOREPLACE RENAME_WHITEOUT
TEMP_FAILURE_RETRY TIME_UTC WCONTINUED WEOF WEXITED WEXITSTATUS WIFCONTINUED WIFEXITED WIFSIGNALED WIFSTOPPED WNOHANG WNOWAIT WORD_BIT
WSTOPPED WSTOPSIG WTERMSIG WUNTRACED alloca assert assert_perror be16toh be32toh be64toh errno htobe16 htobe32 htobe64 htole16 htole32
htole64 isalnum_l isalpha_l isascii isascii_l isblank_l iscntrl_l isdigit_l isgraph_l islower_l isprint_l ispunct_l isspace_l issubnormal
isupper_l isxdigit_l le16toh le32toh le64toh linux math_errhandling offsetof sched_priority stderr stdin stdout strdupa strndupa toascii
toascii_l unix EHWPOISON
"""
_RESERVED = frozenset((*f"{_KEYWORDS} {_USED} {_OTHER_MACROS}".split(), *filter(str.isupper, vars(errno))))


def is_reserved(name: str) -> bool:
    """True if a name has another meaning in generated C++ or in an included header."""
    return name in _RESERVED or _MACROS.fullmatch(name) is not None


class CppNames:
    """C++ names of one scope. Equal names of one kind get equal C++ names, and all other names get different C++ names.

    A name that is reserved, used or not a C++ name gets the first free number: `int` becomes `int_1`. Every name gets `suffix`, such as the
    `_` of class members.
    """

    def __init__(self, taken: Iterable[str] = (), suffix: str = ""):
        self._suffix = suffix
        self._taken = {*_RESERVED, *taken}
        self._given: dict[tuple[str, str], str] = {}

    @property
    def given(self) -> Iterable[str]:
        return self._given.values()

    def of(self, name: str, kind: str = "", apart: Container[str] = ()) -> str:
        """C++ name for `name` that is not in `apart`. A composed name, such as `M_x`, needs a kind, because the user may give the
        same name to another value."""
        if (kind, name) not in self._given:
            free = self._free(name, apart)
            self._given[kind, name] = free
            self._taken.add(free)
        return self._given[kind, name]

    def _free(self, name: str, apart: Container[str]) -> str:
        # C++ reserves double and leading underscores. A trailing underscore marks a member.
        base = re.sub("[^A-Za-z0-9]+", "_", name).strip("_") or "v"
        if _MACROS.fullmatch(base) or base[0].isdigit():  # a size such as 2*M - 1
            base = f"v_{base}"
        number = 0 if base == name else 1
        while (free := f"{base}_{number}{self._suffix}" if number else base + self._suffix) in self._taken or free in apart:
            number += 1
        return free


def other_names(program: ir.HostProgram) -> dict[str, list[str]]:
    """Maps each buffer to other values that are written to its memory, in place or through a view."""
    roots, found = tree.AliasRoots(), dict[str, list[str]]()
    for i in tree.walk(program.body):
        if i.shows:
            roots.define(i)
    for name in dict.fromkeys(name for i in tree.walk(program.body) for name in tree.names(i, "write")):
        if (root := roots.of(name)) != name:
            found.setdefault(root, []).append(name)
    return found


def short_names(program: ir.HostProgram) -> dict[str, str]:
    """Maps a name such as `x_i_2` to `x_i` if the C++ scopes of the two names are disjoint."""
    # The scopes of each name. A scope is the list of the numbers of the enclosing instructions, except instructions of class OnMesh.
    scopes: dict[str, list[list[int]]] = {p.name: [[]] for p in (*program.inputs, *program.outputs)}
    for place in def_use(program).places:
        for name in tree.names(place.instruction, "define", "index"):
            scopes.setdefault(name, []).append([outer.number for outer in place.around if not outer.instruction.ranks])
    result: dict[str, str] = {}
    for name, own in list(scopes.items()):
        base = re.sub(r"_\d+$", "", name)
        if base != name and all(a[: len(b)] != b[: len(a)] for a in own for b in scopes.get(base, [[]])):
            result[name] = base
            scopes[base] += own
    return result


def only_in_calls(program: ir.HostProgram) -> set[str]:
    """Buffers whose only use is as an argument of one call."""
    used = Counter(name for i in tree.walk(program.body) for name in tree.names(i, "read", "write", "alias"))
    calls = (i for i in tree.walk(program.body) if tree.names(i, "call"))
    return {name for i in calls for name in tree.names(i, "read", "write") if used[name] == 1}
