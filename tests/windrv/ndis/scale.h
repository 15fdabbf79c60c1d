/* Receive side scaling (RSS): the table that the checks have set, and loads of all processors. */
#ifndef WINDRV_SCALE_H
#define WINDRV_SCALE_H
#include "traffic.h"

/* hash.c: Toeplitz' hash, and the table from hashes to processors. */

enum { TABLE = 128 };
/* The hash of a packet from the peer, from its ports. */
u32 hash_make(const Flow *, u32 from, u32 to);
/* The hash of the example in Microsoft's documentation, and what it must be. */
u32 hash_example(void);
enum { EXAMPLE_HASH = 0x51ccc178 };
/* Spreads the hashes over this many processors from the first one on; the driver's answer. Where a
 * hash is, depends on `turn`. Without processors, scaling is switched off. */
NDIS_STATUS table_set(u32 first, u32 processors, u32 turn);
/* The turn of the table that the driver has. */
u32 table_turn(void);
/* Whether the table gives a hash to a processor. If the table has changed since that turn, any
 * processor is right: the driver hands over what it has to where it came in. */
int table_gives(u32 turn, u32 hash, u32 processor);

/* scale.c: loads. */

/* Packets of each processor that wait for their answers, and the maximum of a load. */
enum { DEPTH = 32, SHARE = 2048, CONNECTIONS = 16 };
extern struct Load {
    u32 count;            /* of each processor */
    u32 astray;           /* added to each list's hash */
    int offloads, scaled; /* whether the driver has checksums, and the table */
    int loses;            /* packets may be lost */
    int disturbs;         /* the first processor disturbs, and the load ends with `over` */
    int alone;            /* only `sender` sends, packets of `connection`, one after the other */
    int carried;          /* each packet is inside of a frame that the pair of `sender` sends */
    u32 sender, connection, follow_ups;
    volatile int over;
} load;
typedef struct Load Load;
/* What has come back. Misplaced: at another processor than the table says. */
typedef struct {
    u32 sent, arrived, wrong, twice, unknown, late, others, disordered, misplaced, bad_hashes;
    u32 bad_checksums, by_processor[PROCESSORS];
} Landed;
extern Landed landed;
void load_begin(void);
/* A connection whose answers the table gives to a processor. */
u32 load_connection_to(u32 processor);
/* The load of the processor that asks. */
void load_send(void);
/* Reports a check, if it has a name: everything has come back to the right place. */
int load_judge(const char *name);
/* Has all processors send, and judges that. */
int load_run(const char *name, u32 count);
#endif
