/* Lengths of used elements, and what is in the rings. */
#ifndef WINDRV_USED_H
#define WINDRV_USED_H
#include "machine.h"

/* Forgets the chains that are in the rings. */
void used_forget(void);
/* Whether the lengths are judged: not with `used=any`. */
int used_lengths_matter(void);
/* The number of used elements with a wrong length since the last call. */
u32 used_wrong_lengths(void);
/* How often since the last call a used index was beyond the available one. */
u32 used_wrong_indices(void);
/* How often since the last call two processors were in one ring. */
u32 used_collisions(void);
/* The number of chains that the device has not returned. */
u32 used_pending(void);
/* Used elements may be shorter than the chain, but have at least this length; 0: they must not. */
enum { NETWORK_HEADER = 12 };
void used_may_be_shorter(u32 least);
/* Called with the first piece of each chain that enters a ring, and with what comes back. */
typedef void Watch(u32 queue, const u8 *bytes, u32 length);
void used_watch(Watch *);
#endif
