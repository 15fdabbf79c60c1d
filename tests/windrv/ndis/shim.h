/* The part of NDIS and of the kernel below it that NetKVM and the checks use. What is common to all
 * drivers is in kmdf/: threads, waits, the pool. */
#ifndef WINDRV_SHIM_H
#define WINDRV_SHIM_H
#include "../include/ndis/ndis.h"
#include "../kmdf/kmdf.h"

/* adapter.c: one adapter: found, started, stopped, asked and told. */

/* What the driver has told of its adapter. */
typedef struct {
    NDIS_MINIPORT_ADAPTER_GENERAL_ATTRIBUTES general;
    NDIS_RECEIVE_SCALE_CAPABILITIES scale;
    NDIS_OFFLOAD offload; /* as it is by default */
    int has_offload;
    NDIS_LINK_STATE link;
    u32 link_changes, offload_changes;
    int removal; /* the driver asked for the removal of its adapter */
    u32 errors;  /* entries for the event log */
} Told;
typedef struct {
    u32 messages; /* the maximum of MSI-X messages; 0 is INTx */
    u32 processors;
    int together; /* all processors exist and work */
} NicMode;
typedef struct {
    PciAddress pci;
    PciBar bars[6];
    u32 bar_count;
    Interrupts interrupts;
    NDIS_MINIPORT_DRIVER_CHARACTERISTICS driver;
    NDIS_HANDLE context; /* the driver's */
    int running;         /* restarted, and not paused */
    NicMode mode;
    Told told;
} Nic;
/* The adapter that runs. */
extern Nic nic;

/* NULL, or the step that failed. */
const char *nic_start(PciAddress, NicMode);
const char *nic_stop(void);
const char *nic_pause(void);
const char *nic_restart(void);
const char *nic_reset(void);
/* To D3 and back. */
const char *nic_sleep(void);
const char *nic_wake(void);
/* Sends a request to the driver; its status. */
NDIS_STATUS nic_set(NDIS_OID, void *from, u32 length);
/* Also tells how much the driver wrote. */
NDIS_STATUS nic_query(NDIS_OID, void *to, u32 length, u32 *written);

/* interrupts.c */

typedef struct {
    u32 by_message[MAX_MESSAGES]; /* calls of the driver's deferred procedures */
    u32 total, again;             /* and how many the driver asked for itself */
    u32 elsewhere;                /* queued for another processor */
    u32 inside, most_inside;      /* processors within one at the same time */
} Deferred;
extern Deferred deferred;
/* Whether no deferred procedure waits or runs, on any processor. */
int deferred_have_run(void *);
/* At most this many packets may be indicated in a deferred procedure. */
extern u32 throttle;
/* The driver asks Windows for a message for packets to send and one for received packets on each
 * processor. */
enum { MESSAGES_OF_A_PROCESSOR = 2 };
/* The processor that asks, or that the first one acts as. */
u32 current_processor(void);
int ndis_poll(void);
void interrupts_connect(u32 processors, int together);
void interrupts_forget(void);
/* Whether the ISR byte keeps its bits although it was read: how many of STICKY_CALLS interrupts
 * that did not come are claimed, with INTx. The call before each takes what has just come. */
enum { STICKY_CALLS = 10 };
u32 interrupts_sticky(void);
KIRQL ndis_raise(KIRQL);
void ndis_lower(KIRQL);

/* packet.c: packets, in memory that is scattered as the checks want it. */

typedef struct {
    u32 sizes[8]; /* of the pieces, the last one again and again; 0 ends the list */
    u32 offset;   /* of each piece in its page */
} Pieces;
/* A list with one packet. */
PNET_BUFFER_LIST packet_new(const u8 *from, u32 length, const Pieces *);
/* Adds a packet to a list. */
void packet_add(PNET_BUFFER_LIST, const u8 *from, u32 length, const Pieces *);
void packet_free(PNET_BUFFER_LIST);
/* Copies a packet, of which the driver indicates one in a list, and returns its length. */
u32 packet_copy(PNET_BUFFER, u8 *to, u32 room);
/* Sends a chain of lists. */
void packets_send(PNET_BUFFER_LIST);
extern struct Sent {
    u32 sent, completed, failed;
    NDIS_STATUS status; /* of the last failure */
} sent;
/* Whether all sent lists have been completed within the time limit. */
int packets_completed(void);
/* Lists that are kept are returned to the driver by `packets_return`. */
extern struct Received {
    u32 lists, with_resources, kept, by_processor[PROCESSORS];
} received;
extern u32 keep; /* at most this many received lists are kept */
void packets_return(void);
/* Called for each received packet, by one processor at a time: what it uses is under this lock. */
extern int delivery_lock;
extern void (*on_receive)(PNET_BUFFER_LIST, const u8 *frame, u32 length);

/* services.c */

/* The number of objects that the driver has not released: locks, work items, pools. */
u32 services_in_use(void);
int run_work_items_ndis(void);
/* Replaces a parameter of the INF file's defaults; NULL ends all replacements. */
void parameter_set(const char *name, u32 value);

/* ../source/kernel.c */
extern u32 active_processors;
#endif
