# Reads CTest's LastTest.log for tests/run.sh. Prints "time: SECONDS NAME" for each test, "skip: in NAME: ..." for what
# a test left out, and the closing line of all. A test counts as the closing line that it prints (a script), else as
# its cases (a program with the harness), else as one.
/^[0-9]+\/[0-9]+ Test(ing)?: / { name = $NF; ok = bad = out = lines = 0; said = lost = 0; next }
/^Command: ""$/ { lost = 1 } # its program did not build, which the log takes for passed
/^\[       OK \] / { ok++ }
/^\[  FAILED  \] [a-z]/ { bad++ }
/^\[  SKIPPED \] [a-z]/ { out++; print "skip: in " name ": " $4 }
/^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$/ { said = 1; sp += $1; sf += $3; ss += $5 }
/^  skip  / && !/also with --strict/ { line = $0; sub(/^  skip  /, "", line); print "skip: in " name ": " line }
/^Test time = / { printf "time: %8.1f s  %s\n", $4, name }
/^Test (Passed|Failed|Skipped|Timeout)|^Test not run|^(SEGFAULT|Unable to find)/ { finish() }
function finish() {
    if (name == "") return
    if (said) { ok = sp; bad = sf; out = ss }
    if (lost) bad = 1
    if ($2 != "Passed." && $2 != "Skipped." && bad == 0) bad = 1
    if (ok + bad + out == 0 && $2 == "Passed.") ok = 1
    if (ok + bad + out == 0) { out = 1; print "skip: in " name ": it does not run here" }
    passed += ok; failed += bad; skipped += out
    sp = sf = ss = 0
    name = ""
}
END { printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped }
