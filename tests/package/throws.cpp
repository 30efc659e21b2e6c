/* An exception leaves the function of a single rank, which mt_launch and mt_world_from_env run. It must reach their
   caller, and they must free what they allocated: LeakSanitizer checks this at the end. */
#include <megatron.h>
#include <stdlib.h>

static mt_status rank_main(mt_comm *world, void *user) {
    mt_comm *group;
    *(int *)user += 1;
    MT_TRY(mt_comm_split(world, 0, 0, &group));
    throw 42;
}

typedef mt_status (*launcher)(const mt_launch_desc *desc, mt_rank_function rank_main, void *user);

static int caught(launcher launch) {
    int runs = 0;
    try {
        launch(NULL, rank_main, &runs);
    } catch (int x) {
        return runs == 1 && x == 42;
    }
    return 0;
}

int main() {
    if (!caught(mt_launch)) return 1;
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "1", 1);
    return caught(mt_world_from_env) ? 0 : 1;
}
