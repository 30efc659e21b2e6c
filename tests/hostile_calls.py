#!/usr/bin/env python3
"""Writes a C function for each public function of the headers, which calls it with arguments of tests/hostile_calls.c.

    python3 tests/hostile_calls.py > hostile_calls_table.h     in the root of the checkout

A declaration, a type or a field that it does not understand is an error: so a new public function is either called or
noticed. hostile_calls.c has one function `pick_KIND` for each kind of argument.
"""
import re
import sys

HEADERS = ["mt_comm.h", "mt_kernels.cuh", "mt_parallel.h", "megatron.h"]
INTEGERS = {"int", "int32_t", "int64_t", "uint32_t", "uint64_t", "size_t", "uint16_t", "char", "unsigned char"}
FLOATS = {"float", "double"}
# Structures that the library fills: callers pass them on as they are, or zero-filled, but do not set their fields.
FILLED = re.compile(r"mt_(\w+_saved|grid|param|parallel_linear|norm_layer|mlp|"
                    r"optimizer|step|vocab_parallel_embedding|self_attention|cross_attention|transformer_layer|"
                    r"language_model|gpt|bert|qk_norm|gpt_cache|trace|trace_entry|safetensors_tensor|nccl_id|"
                    r"multi_tensor|step_values)$")
# Structures of which callers pass arrays, with a count.
LISTS = {"mt_setting", "mt_arena_request", "mt_action", "mt_operand", "mt_arg", "mt_adamw_tensor", "mt_square_tensor",
         "mt_tensor", "mt_field"}
# Return the status that they get.
PASSED = {"mt_fail", "mt_comm_fail", "mt_check_resume", "mt_check_view_end", "mt_overlap_end", "mt_create_end",
          "mt_defer_weight_gradients_end"}
# Arguments of one function that are no others of their type: the slot of the program, and an array with a count.
OWN_KINDS = {("mt_context_slot_create", "slot"): "slot", ("mt_comm_create_local", "comms"): "outs"}
# Free or end what is passed, which must be the library's: they get no object twice.
ENDS = re.compile(r"_(destroy|free|close|finish|abandon)$")


def fail(text):
    sys.exit("hostile_calls.py: " + text)


def public_text(path):
    text = open(path, encoding="utf-8").read().split("the API ends here")[0]
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"\\\n", " ", text)
    return re.sub(r"^\s*#.*$", "", text, flags=re.M)


def split_list(text):
    return [part.strip() for part in re.split(r",(?![^()]*\))", text)]


def functions(text):
    """Returns (name, return type, parameters) of each declaration."""
    found = re.findall(r"\bMT_API\s+([^;{}()]*?)\b(mt_\w+)\s*\(((?:[^()]|\([^()]*\))*)\)\s*;", text)
    if len(found) != len(re.findall(r"\bMT_API\b", text)):
        fail("some declarations with MT_API were not understood")
    for result, name, parameters in found:
        parameters = re.sub(r"\s+", " ", parameters).strip()
        yield name, result.strip(), [] if parameters == "void" else split_list(parameters)


class Types:
    def __init__(self, text):
        self.structs = dict(re.findall(r"\bstruct (\w+) \{(.*?)\}(?: \1)?;", text, flags=re.S))
        self.enums = set(re.findall(r"typedef enum (\w+)", text))
        self.callbacks = {name: (result, parameters) for result, name, parameters in
                          re.findall(r"typedef ([^;{}()]*)\(\*(\w+)\)\(([^;]*)\);", text)}
        self.opaque = set(re.findall(r"typedef struct \w+ (\w+);", text)) - set(self.structs)


def declared(text):
    """Returns (type, name, is an array) of a parameter or field."""
    match = re.match(r"(.*?)\b(\w+)\s*(\[[^\]]*\])?$", text)
    if not match:
        fail("cannot read '%s'" % text)
    return re.sub(r"\s+", " ", match.group(1)).strip().replace(" *", "*"), match.group(2), bool(match.group(3))


def kind_of(types, text):
    """Returns the kind of a parameter, and its type in C."""
    if "(*" in text:
        return "null", "void *"
    ctype, name, is_array = declared(text)
    base = ctype.replace("const ", "").rstrip("*").strip()
    stars = ctype.count("*") + is_array
    if stars == 0:
        kinds = [(base == "size_t", "size"), (base in INTEGERS, "integer"), (base in FLOATS, "number"),
                 (base in types.enums, "integer"),
                 (base == "mt_tensor", "tensor"), (base in types.callbacks, "callback_" + base),
                 (base in types.structs, "value_" + base)]
        for is_kind, kind in kinds:
            if is_kind:
                return kind, base
        fail("unknown type of '%s'" % text)
    if stars == 2:
        return ("out" if "const" not in ctype else "raw"), "void *"
    if base == "char" and ctype.startswith("const"):
        return ("format" if name == "format" else "text"), "const char *"
    if base in INTEGERS | FLOATS | {"void"} | types.enums or base.startswith("struct "):
        return "raw", "void *"
    if base in types.structs and name == "out" and not ctype.startswith("const"):
        return "scratch", "void *"
    if base in types.opaque or base in types.structs:
        return "object_" + base, "void *"
    fail("unknown type of '%s'" % text)


def fields(types, name):
    """Yields (field, kind, type) of a structure."""
    for line in types.structs[name].split(";"):
        line = re.sub(r"\s+", " ", line).strip()
        if not line:
            continue
        if "(*" in line:
            continue
        first, *more = split_list(line)
        ctype, field, is_array = declared(first)
        for text in [first] + [ctype.replace("*", "") + " " + m for m in more]:
            ctype, field, is_array = declared(text)
            if is_array or "*" in text or ctype in types.callbacks:
                continue
            kind, base = kind_of(types, text)
            yield field, kind, base


def write_fill(types, name, out):
    lines = []
    for field, kind, base in fields(types, name):
        if kind.startswith("value_"):
            lines.append("    if (rarely(h)) fill_%s(h, &s->%s);" % (base, field))
        else:
            lines.append("    if (rarely(h)) s->%s = (%s)hostile_%s(h);" %
                         (field, base, "integer" if kind == "size" else kind) if kind != "tensor" else
                         "    if (rarely(h)) s->%s = hostile_tensor(h);" % field)
    out.append("static void fill_%s(hostile *h, %s *s) {\n    (void)h, (void)s;\n%s\n}\n" %
               (name, name, "\n".join(lines)))


def in_order(types):
    """The structures, those of which others have fields first."""
    order = []

    def visit(name):
        for _, kind, base in fields(types, name):
            if kind.startswith("value_"):
                visit(base)
        if name not in order and name != "mt_tensor":
            order.append(name)
    for name in types.structs:
        visit(name)
    return order


def write_pickers(types, out):
    for name in in_order(types):
        write_fill(types, name, out)
        out.append("static %s pick_value_%s(hostile *h, int i) {\n    %s s;\n    memset(&s, 0, sizeof s);\n"
                   "    if (h->variant[i] > 0) fill_%s(h, &s);\n    return s;\n}\n" % (name, name, name, name))
        fill = "fill_nothing" if FILLED.match(name) else "fill_%s" % name
        out.append("static void *pick_object_%s(hostile *h, int i) {\n"
                   "    return pick_structure(h, i, \"%s\", sizeof(%s), %d, (filler)%s);\n}\n" %
                   (name, name, name, name in LISTS, fill))
    out.append("static void *pick_object_mt_tensor(hostile *h, int i) {\n"
               "    return pick_structure(h, i, \"mt_tensor\", sizeof(mt_tensor), 1, (filler)fill_tensor);\n}\n")

    for name in sorted(types.opaque):
        out.append("static void *pick_object_%s(hostile *h, int i) { return pick_opaque(h, i, \"%s\"); }\n" %
                   (name, name))
    for name, (result, parameters) in types.callbacks.items():
        result = result.strip()
        names = [declared(p)[1] for p in split_list(parameters)]
        out.append("static %s stub_%s(%s) {\n    %s\n    %s\n}\n" %
                   (result, name, re.sub(r"\s+", " ", parameters), " ".join("(void)%s;" % n for n in names),
                    "return;" if result == "void" else "return MT_SUCCESS;"))
        out.append("static %s pick_callback_%s(hostile *h, int i) { return h->variant[i] == 0 ? stub_%s : NULL; }\n" %
                   (name, name, name))


def write_call(types, name, result, parameters, out):
    kinds, arguments, lines = [], [], []
    for i, text in enumerate(parameters):
        if text == "...":
            continue
        kind, ctype = kind_of(types, text)
        if ENDS.search(name) and kind.startswith("object_") and kind not in ("object_mt_context", ):
            kind = "null"
        if ENDS.search(name) and (kind == "raw" or len(parameters) == 1):
            kind = "null"
        if not kind.startswith("callback_") and "(*" not in text:
            kind = OWN_KINDS.get((name, declared(text)[1]), kind)
        kinds.append(kind)
        pick = "pick_%s(h, %d)" % (kind, i)
        if ctype not in ("void *", "const char *", "mt_tensor") and not kind.startswith(("value_", "callback_")):
            pick = "(%s)%s" % (ctype, pick)
        lines.append("    %s a%d = %s;" % (ctype if ctype.endswith("*") else ctype + " ", i, pick))
        arguments.append("(%s)a%d" % (declared(text)[0], i) if ctype == "void *" and "(*" not in text and
                         "[" not in text else "(void (*)(mt_context *, void *))a%d" % i if "(*" in text else "a%d" % i)
    call = "%s(%s)" % (name, ", ".join(arguments))
    judge = {"mt_status": "    judge(h, %s);", "void": "    %s;"}.get(
        "" if name in PASSED else result, "    (void)%s;") % call
    out.append("static void call_%s(hostile *h) {\n%s\n%s\n}\n" % (name, "\n".join(lines) or "    (void)h;", judge))
    return '    {"%s", call_%s, "%s"},' % (name, name, " ".join(k.split("_mt_")[0] if k.startswith("callback_") or
                                                                 k.startswith("value_") else k for k in kinds))


def main():
    text = "\n".join(public_text(h) for h in HEADERS)
    for name, other in re.findall(r"typedef (mt_\w+) (mt_\w+);", text):  # two names of one type
        text = re.sub(r"\b%s\b" % other, name, text.replace("typedef %s %s;" % (name, other), ""))
    types, out, table = Types(text), [], []
    write_pickers(types, out)
    for name, result, parameters in functions(text):
        table.append(write_call(types, name, result, parameters, out))
    if len(table) != len(set(table)) or len(table) < 400:
        fail("%d functions: some are missing, or twice" % len(table))
    print("/* Written by hostile_calls.py. */")
    print("\n".join(out))
    print("static const call calls[] = {\n%s\n};" % "\n".join(table))


main()
