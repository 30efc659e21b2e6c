/* ---- how ranks over NCCL prove that they belong to a group ------------------------------------------------------- */

#pragma once
#include "types.h"

#if MTI_COMPARES

static uint64_t mti_siphash_turn(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static void mti_siphash_round(uint64_t v[4]) {
    v[0] += v[1];
    v[2] += v[3];
    v[1] = mti_siphash_turn(v[1], 13) ^ v[0];
    v[3] = mti_siphash_turn(v[3], 16) ^ v[2];
    v[0] = mti_siphash_turn(v[0], 32);
    v[2] += v[1];
    v[0] += v[3];
    v[1] = mti_siphash_turn(v[1], 17) ^ v[2];
    v[3] = mti_siphash_turn(v[3], 21) ^ v[0];
    v[2] = mti_siphash_turn(v[2], 32);
}

/* SipHash-2-4 with a result of 64 bits (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012). Who does not
   know the key cannot tell the hash of data that he has not seen hashed. */
static uint64_t mti_siphash(const uint64_t key[2], const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    uint64_t v[4];
    size_t at, i;
    v[0] = key[0] ^ 0x736f6d6570736575u;
    v[1] = key[1] ^ 0x646f72616e646f6du;
    v[2] = key[0] ^ 0x6c7967656e657261u;
    v[3] = key[1] ^ 0x7465646279746573u;
    for (at = 0; at <= bytes; at += 8) { /* the last word has the bytes that are left, and their number */
        uint64_t word = bytes - at < 8 ? (uint64_t)bytes << 56 : 0;
        for (i = 0; i < 8 && at + i < bytes; i++) word |= (uint64_t)p[at + i] << 8 * i;
        v[3] ^= word;
        mti_siphash_round(v);
        mti_siphash_round(v);
        v[0] ^= word;
    }
    v[2] ^= 255;
    for (i = 0; i < 4; i++) mti_siphash_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

/* Writes random numbers of the system. Returns 0 when there are none: nothing else may take their place. */
static int mti_random(uint64_t out[2]) {
    size_t got = 0, all = 2 * sizeof *out;
    ssize_t n = 1;
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    while (got < all && (n > 0 || (n < 0 && errno == EINTR))) {
        n = read(fd, (char *)out + got, all - got);
        if (n > 0) got += (size_t)n;
    }
    close(fd);
    return got == all;
}

/* What proves to the rank at the other end of a connection that this one knows the secret. kind: that of the message
   with the proof, MTI_MESSAGE_CHALLENGE of a parent or MTI_MESSAGE_PROOF of a child; hello, challenge: the random
   numbers of the child and of the parent. A proof is of use only in its own connection, and in one direction. */
static uint64_t mti_proof(const uint64_t secret[2], int kind, int child, int parent, const uint64_t hello[2],
                          const uint64_t challenge[2]) {
    uint64_t said[7];
    said[0] = (uint64_t)kind;
    said[1] = (uint64_t)child;
    said[2] = (uint64_t)parent;
    memcpy(said + 3, hello, 2 * sizeof *hello);
    memcpy(said + 5, challenge, 2 * sizeof *challenge);
    return mti_siphash(secret, said, sizeof said);
}
#endif
