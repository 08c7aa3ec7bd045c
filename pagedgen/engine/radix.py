"""The compiled half of `prefix_tree.py`: a path-compressed trie in flat arrays. Node 0 and every other root has no parent (-1).

A node is an edge: `length` tokens from `start` in the pool, below `parent`. Children are found through one open-addressing hash
table over (parent, first token), which holds node ids (-1: free).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ..kernels.disk_cache import locked


@njit(boundscheck=False)
def _find(parents, starts, pool, table, node, token):
    """Return the slot of a node's child that begins with a token, or the free slot where it would be."""
    mask = np.uint64(table.shape[0] - 1)
    key = (np.uint64(node) * np.uint64(0x9E3779B97F4A7C15)) ^ (np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F))
    slot = (key ^ (key >> np.uint64(29))) & mask
    while table[slot] >= 0:
        child = table[slot]
        if parents[child] == node and pool[starts[child]] == token:
            break
        slot = (slot + np.uint64(1)) & mask
    return slot


@locked
@njit(cache=True, nogil=True, boundscheck=False)
def insert(parents, starts, lengths, pool, table, num_nodes, num_pooled, tokens, bounds, roots, ends):
    """Insert prompts; return (num_nodes, num_pooled) after it.

    tokens (T,) int32 are the prompts one after the other, prompt i from bounds[i] to bounds[i + 1], below roots[i]; ends[i]
    becomes the node it ends at. There is room for two nodes a prompt and for all tokens.
    """
    for i in range(roots.shape[0]):
        node, at, end = roots[i], bounds[i], bounds[i + 1]
        while at < end:
            slot = _find(parents, starts, pool, table, node, tokens[at])
            child = table[slot]
            if child < 0:  # nobody came this way: one edge for the rest
                parents[num_nodes], starts[num_nodes], lengths[num_nodes] = node, num_pooled, end - at
                for t in range(at, end):  # a slice would bring the message of an error that can't be, 3 s to compile
                    pool[num_pooled + t - at] = tokens[t]
                num_pooled += end - at
                table[slot] = num_nodes
                node, at = num_nodes, end
                num_nodes += 1
                break
            edge, length, common = starts[child], lengths[child], 1
            most = min(length, end - at)
            while common < most and pool[edge + common] == tokens[at + common]:
                common += 1
            at += common
            if common < length:  # they part within the edge: its upper half becomes a node of its own
                parents[num_nodes], starts[num_nodes], lengths[num_nodes] = node, edge, common
                table[slot] = num_nodes
                parents[child], starts[child], lengths[child] = num_nodes, edge + common, length - common
                table[_find(parents, starts, pool, table, num_nodes, pool[edge + common])] = child
                node = num_nodes
                num_nodes += 1
            else:
                node = child
        ends[i] = node
    return num_nodes, num_pooled


@locked
@njit(cache=True, nogil=True, boundscheck=False)
def fill_table(parents, starts, pool, table, num_nodes):
    """Enter all nodes into an empty, larger hash table."""
    for node in range(num_nodes):
        if parents[node] >= 0:
            table[_find(parents, starts, pool, table, parents[node], pool[starts[node]])] = node


@locked
@njit(cache=True, nogil=True, boundscheck=False)
def measure(parents, lengths, ends, depths, users, preorder):
    """Fill depths (tokens down to a node's end), users (prompts through or to it) and preorder (parents before children)."""
    num_nodes = parents.shape[0]
    first = np.zeros(num_nodes + 2, np.int32)  # where the children of node p begin is first[p + 1]; roots' parent is -1
    for node in range(num_nodes):
        first[parents[node] + 2] += 1
    for p in range(num_nodes + 1):
        first[p + 1] += first[p]
    children = np.empty(num_nodes, np.int32)
    at = first[:-1].copy()
    for node in range(num_nodes):
        children[at[parents[node] + 1]] = node
        at[parents[node] + 1] += 1
    stack = np.empty(num_nodes, np.int32)
    top = 0
    count = 0
    for node in range(num_nodes):
        if parents[node] < 0:
            stack[top] = node
            top += 1
            while top > 0:
                top -= 1
                current = stack[top]
                preorder[count] = current
                count += 1
                depths[current] = lengths[current] + (depths[parents[current]] if parents[current] >= 0 else 0)
                for k in range(first[current + 1], first[current + 2]):
                    stack[top] = children[k]
                    top += 1
    users[:] = 0
    for i in range(ends.shape[0]):
        users[ends[i]] += 1
    for k in range(num_nodes - 1, -1, -1):
        node = preorder[k]
        if parents[node] >= 0:
            users[parents[node]] += users[node]


@locked
@njit(cache=True, nogil=True, boundscheck=False)
def find_groups(parents, depths, users, preorder, block_size, groups):
    """groups[node]: the deepest node from the root down to it that adds a full block which several prompts share, or -1."""
    for k in range(preorder.shape[0]):
        node = preorder[k]
        parent = parents[node]
        groups[node] = -1
        if parent >= 0:
            groups[node] = groups[parent]
            if users[node] > 1 and depths[node] // block_size > depths[parent] // block_size:
                groups[node] = node


@locked
@njit(cache=True, nogil=True, boundscheck=False)
def walk(parents_of_items, items, num_rows, order):
    """Depth first through groups: items are sorted by parent, then as they are to come; rows are ids below num_rows.

    parents_of_items (M,) and items (M,): the parent of each (0: none, else 1 + the group's number) and the item itself, a row
    or num_rows + the group's number. order (num_rows,) is filled.
    """
    num_parents = 1
    for i in range(items.shape[0]):
        num_parents += items[i] >= num_rows
    first = np.zeros(num_parents + 1, np.int64)
    for i in range(items.shape[0]):
        first[parents_of_items[i] + 1] += 1
    for p in range(num_parents):
        first[p + 1] += first[p]
    at = first[:-1].copy()
    up = np.zeros(num_parents, np.int64)  # where a group was entered from
    current, count = 0, 0
    while True:
        if at[current] == first[current + 1]:
            if current == 0:
                return
            current = up[current]
            continue
        item = items[at[current]]
        at[current] += 1
        if item < num_rows:
            order[count] = item
            count += 1
        else:
            below = item - num_rows + 1
            up[below] = current
            current = below
