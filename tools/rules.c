/* rules.c - prints the rules of all operators as rows of a table, for docs/checking.md. tools/rules.sh compiles it.

   The rows come from the tables of the operators (src/ops/tables.c). An operator that has another rule for some of its
   calls is in `others`, too. */

#define MEGATRON_IMPLEMENTATION
#include "mt_kernels.cuh"

#include <stdio.h>

typedef struct other {
    const char *name, *calls; /* NULL: all that are not below */
    const mt_rule *rule;
} other;

#define FORWARD "mt_dot_product_attention_forward"
#define BACKWARD "mt_dot_product_attention_backward"

static const other others[] = {
    {"mt_gemm", "B transposed", &mti_gemm_rules[0][1]},
    {"mt_gemm", "A transposed", &mti_gemm_rules[1][0]},
    {"mt_gemm", "both transposed", &mti_gemm_rules[1][1]},
    {"mt_rotary_forward", "one sequence", &mti_rotary_rules[0][0]},
    {"mt_rotary_forward", "with part", &mti_rotary_rules[1][0]},
    {"mt_rotary_backward", "one sequence", &mti_rotary_rules[0][1]},
    {"mt_rotary_backward", "with part", &mti_rotary_rules[1][1]},
    {"mt_attention_forward", "with part", &mti_attention_part_rules[0]},
    {"mt_attention_backward", "with part", &mti_attention_part_rules[1]},
    {FORWARD, NULL, &mti_dot_product_rules[0][0][0]},
    {FORWARD, "one group", &mti_dot_product_rules[1][0][0]},
    {FORWARD, "no position counts", &mti_dot_product_rules[0][1][0]},
    {FORWARD, "by position, one sequence", &mti_dot_product_rules[0][2][0]},
    {FORWARD, "with part", &mti_dot_product_rules[0][3][0]},
    {BACKWARD, NULL, &mti_dot_product_rules[0][0][1]},
    {BACKWARD, "one group", &mti_dot_product_rules[1][0][1]},
    {BACKWARD, "no position counts", &mti_dot_product_rules[0][1][1]},
    {BACKWARD, "by position, one sequence", &mti_dot_product_rules[0][2][1]},
    {BACKWARD, "with part", &mti_dot_product_rules[0][3][1]},
};

/* Prints the names of a rule's operands, without "(x)". */
static void print_operands(const char *next) {
    const char *word;
    for (size_t length; (length = mti_rule_word(&next, &word)) > 0;) printf(" %.*s", (int)length, word);
}

/* base: the rule of the calls that are none of these, or NULL */
static void print_row(const char *name, const char *calls, const mt_rule *rule, const mt_rule *base) {
    size_t same = base ? strlen(base->cases) : 0;
    int adds = base && strncmp(rule->cases, base->cases, same) == 0 && rule->cases[same] == ' ';
    printf("| `%s`%s%s |", name, calls ? ", " : "", calls ? calls : "");
    print_operands(rule->operands);
    printf(" | %s%s | %s%s|\n", adds ? "the same, and" : "", rule->cases + (adds ? same : 0),
           rule->data_cases ? rule->data_cases : "", rule->data_cases ? " " : "");
}

static void print_rows(const mti_table *table) {
    const mt_rule *base = NULL;
    if (table->rule.operands) print_row(table->name, NULL, base = &table->rule, NULL);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        if (strcmp(others[i].name, table->name) != 0) continue;
        print_row(table->name, others[i].calls, others[i].rule, base);
        if (!base) base = others[i].rule;
    }
}

int main(void) {
    printf("| operator | operands | cases | further cases over data |\n|---|---|---|---|\n");
    for (size_t t = 0; t < sizeof mti_tables / sizeof *mti_tables; t++) print_rows(mti_tables[t]);
    return 0;
}
