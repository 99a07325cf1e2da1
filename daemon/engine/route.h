/* SPDX-License-Identifier: MIT */
/*
 * route.h: what the router of a layer chose for the rows of a batch, sorted by expert.
 *
 * Owns no memory: the arrays lie in what the caller gives. Pure, any thread. Who chooses (the CPU's softmax, a card) fills chosen and
 * weight, route_sort() the rest. Refuses to know how one chooses, where experts are, and what they compute.
 * Invariant of a sorted route: every slot has one place, every place one slot; places of an expert are in token order, and no token has
 * two of the same expert.
 */
#pragma once

#include "daemon/base.h"

/* A slot is one (token, choice) pair: slot t * n_used + k is the k-th choice of token t. Places are the slots sorted by expert. */
struct route {
	size_t n_tok, n_used, n_expert;
	uint32_t *chosen; /* expert of each slot */
	float *weight;    /* of each slot */
	uint32_t *place;  /* of each slot */
	uint32_t *token;  /* of each place */
	size_t *first;    /* [n_expert + 1]: expert e has the places [first[e], first[e + 1]) */
	uint32_t *active; /* experts that have places, ascending */
	uint32_t *n_rows; /* and how many */
	size_t n_active;
};

/* SIZE_MAX: more than there can be, no allocation of that succeeds. */
size_t route_bytes(size_t n_tok, size_t n_used, size_t n_expert);
/* mem: route_bytes() for the same numbers, 64-byte aligned, as the arrays then are; chosen and weight lie first in it. */
void route_init(struct route *r, void *mem, size_t n_tok, size_t n_used, size_t n_expert);
/* 0; -EIO: chosen has what is no expert, or a token has one twice: nothing is sorted. */
int route_sort(struct route *r);
