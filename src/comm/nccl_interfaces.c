/* ---- the address at which a rank over NCCL listens --------------------------------------------------------------- */

#pragma once
#include "types.h"

#if MTI_COMPARES

/* A rank listens at one address only: the one that NCCL chooses for its own connections (ncclFindInterfaces in NCCL's
   src/misc/socket.cc). NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY select it. Without them an interface whose name begins
   with ib comes first, then one in the subnet of the address in NCCL_COMM_ID, then any other except docker, lo and
   virbr, which follow in this order. Of those that match, the first one that the system lists counts. Here, addresses
   that are valid on one link or one machine only (fe80::, ::1) count when there is no other. */

typedef struct mti_address {
    int family;             /* AF_INET or AF_INET6; 0: none */
    unsigned char host[16]; /* in network order; of IPv4 the first 4 bytes, and zeros */
    uint32_t scope;         /* of a link-local address of IPv6: the number of the interface on this machine */
} mti_address;

typedef struct mti_interface {
    const char *name;
    mti_address at, mask;
} mti_interface;

/* family 0: the address is of another family, or NULL */
static mti_address mti_address_of(const struct sockaddr *from) {
    mti_address a;
    struct sockaddr_in in;
    struct sockaddr_in6 in6;
    memset(&a, 0, sizeof a);
    if (from && from->sa_family == AF_INET) {
        memcpy(&in, from, sizeof in);
        memcpy(a.host, &in.sin_addr, 4);
        a.family = AF_INET;
    } else if (from && from->sa_family == AF_INET6) {
        memcpy(&in6, from, sizeof in6);
        memcpy(a.host, &in6.sin6_addr, 16);
        a.scope = in6.sin6_scope_id;
        a.family = AF_INET6;
    }
    return a;
}

/* Writes the address for bind and connect. Returns its bytes. */
static socklen_t mti_address_write(const mti_address *a, uint16_t port, struct sockaddr_storage *to) {
    struct sockaddr_in in;
    struct sockaddr_in6 in6;
    memset(to, 0, sizeof *to);
    if (a->family == AF_INET) {
        memset(&in, 0, sizeof in);
        in.sin_family = AF_INET;
        in.sin_port = htons(port);
        memcpy(&in.sin_addr, a->host, 4);
        memcpy(to, &in, sizeof in);
        return (socklen_t)sizeof in;
    }
    memset(&in6, 0, sizeof in6);
    in6.sin6_family = AF_INET6;
    in6.sin6_port = htons(port);
    in6.sin6_scope_id = a->scope;
    memcpy(&in6.sin6_addr, a->host, 16);
    memcpy(to, &in6, sizeof in6);
    return (socklen_t)sizeof in6;
}

static int mti_address_is_link_local(const mti_address *a) {
    return a->family == AF_INET6 && a->host[0] == 0xfe && (a->host[1] & 0xc0) == 0x80;
}

/* Whether only this machine, or one link, knows the address. Of IPv4, lo has such addresses, and comes late anyway. */
static int mti_address_is_poor(const mti_address *a) {
    static const unsigned char loopback[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
    return mti_address_is_link_local(a) || (a->family == AF_INET6 && memcmp(a->host, loopback, 16) == 0);
}

/* Whether a list in the format of NCCL_SOCKET_IFNAME selects the interface: names that begin with one of the list, with
   a leading "=" those of the list, and with a leading "^" or "^=" all others. */
static int mti_interface_matches(const char *list, const char *name) {
    int excludes = *list == '^', exact, found = 0, names = 0;
    list += excludes;
    exact = *list == '=';
    list += exact;
    while (*list) {
        size_t n = strcspn(list, ",:"), next = strcspn(list, ","); /* NCCL ignores a :port */
        if (n) found |= strncmp(name, list, n) == 0 && (!exact || name[n] == '\0');
        names += n > 0;
        list += next + (list[next] == ',');
    }
    return (found || !names) != excludes;
}

static int mti_interface_is_beside(const mti_interface *i, const mti_address *other) {
    int k;
    if (i->at.family != other->family || i->at.scope != other->scope) return 0;
    for (k = 0; k < 16 && !((i->at.host[k] ^ other->host[k]) & i->mask.host[k]); k++) continue;
    return k == 16;
}

/* Chooses one of `count` interfaces; NULL: none matches. list: NCCL_SOCKET_IFNAME, or NULL; family: 0: any; beside: the
   address in NCCL_COMM_ID, or NULL. NCCL does not look at the family where it looks at the subnet. */
static const mti_interface *mti_interface_choose(const mti_interface *all, int count, const char *list, int family,
                                                 const mti_address *beside) {
    static const char *const lists[] = {"ib", NULL, "^docker,lo,virbr", "docker", "lo", "virbr"};
    int poor, step, i, steps = list ? 1 : (int)(sizeof lists / sizeof *lists);
    for (poor = 0; poor < 2; poor++)
        for (step = 0; step < steps; step++)
            for (i = 0; i < count; i++) {
                const char *names = list ? list : lists[step];
                if (!names && beside && mti_interface_is_beside(&all[i], beside)) return &all[i];
                if (!names || (family && all[i].at.family != family)) continue;
                if ((poor || !mti_address_is_poor(&all[i].at)) && mti_interface_matches(names, all[i].name))
                    return &all[i];
            }
    return NULL;
}

/* Resolves host:port or [host]:port of NCCL_COMM_ID. Returns 0 when it cannot. */
static int mti_address_resolve(const char *id, mti_address *at) {
    char host[256];
    struct addrinfo hints, *found = NULL;
    int brackets = *id == '[';
    size_t n = strcspn(id += brackets, brackets ? "]" : ":");
    if (n == 0 || n >= sizeof host) return 0;
    memcpy(host, id, n);
    host[n] = '\0';
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(host, NULL, &hints, &found) != 0) return 0;
    *at = mti_address_of(found->ai_addr);
    freeaddrinfo(found);
    return at->family != 0;
}

/* The address of this machine at which the rank listens. Returns 0 when there is none, or no memory. */
static int mti_address_choose(mti_address *out) {
    const char *list = getenv("NCCL_SOCKET_IFNAME"), *family = getenv("NCCL_SOCKET_FAMILY"),
               *id = getenv("NCCL_COMM_ID");
    const int wanted = !family ? 0 : !strcmp(family, "AF_INET") ? AF_INET : !strcmp(family, "AF_INET6") ? AF_INET6 : 0;
    const mti_interface *chosen = NULL;
    mti_interface *interfaces;
    mti_address beside;
    struct ifaddrs *all = NULL, *a;
    int count = 0;
    memset(&beside, 0, sizeof beside);
    if (list && strlen(list) < 2) list = NULL; /* as NCCL does */
    if (!list && id) mti_address_resolve(id, &beside);
    if (getifaddrs(&all) != 0) return 0;
    for (a = all; a; a = a->ifa_next) count++;
    interfaces = (mti_interface *)calloc((size_t)count + 1, sizeof *interfaces);
    for (a = all, count = 0; a && interfaces; a = a->ifa_next) {
        interfaces[count].name = a->ifa_name;
        interfaces[count].at = mti_address_of(a->ifa_addr);
        interfaces[count].mask = mti_address_of(a->ifa_netmask);
        count += interfaces[count].at.family != 0 && (a->ifa_flags & IFF_RUNNING);
    }
    if (interfaces) chosen = mti_interface_choose(interfaces, count, list, wanted, beside.family ? &beside : NULL);
    if (chosen) *out = chosen->at;
    free(interfaces);
    freeifaddrs(all);
    return chosen != NULL;
}
#endif
