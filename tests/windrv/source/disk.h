/* The disk under test, and the functions with which checks read, write and judge. */
#ifndef WINDRV_DISK_H
#define WINDRV_DISK_H
#include "port.h"
#include "used.h"

enum { PAGE = 4096, PAGES = 12288, MAX_REQUESTS = 420 };
/* The part of a disk that the checks write, in bytes. The rest keeps the host's content. */
enum { REGION = 48 << 20 };
enum { SCRATCH = 65536 };
enum { FROM_DISK = SRB_FLAGS_DATA_IN, TO_DISK = SRB_FLAGS_DATA_OUT };

/* The properties that the drivers report, and the expected content. */
typedef struct {
    Adapter *adapter;
    int scsi, read_only;
    int discard;      /* the disk offers UNMAP */
    u32 unmap_ranges; /* the maximum in one UNMAP */
    u32 block;        /* bytes of a block */
    u64 blocks;
    u32 longest;     /* bytes of the longest transfer */
    u32 max_pieces;  /* the maximum of one transfer */
    u32 region;      /* blocks of REGION */
    u32 *generation; /* of each of these blocks: see data.c */
    u8 *zeroed;      /* unmapped blocks: they may read as zeros */
    u32 seconds;     /* the time limit for an answer */
    u32 attentions;  /* unit attentions so far */
    u32 resetting;   /* the last reset may still meet a request */
    void (*sent)(void); /* called after requests were sent, before their answers are taken */
} Disk;
extern Disk disk;
extern Request *requests[MAX_REQUESTS];
/* The data buffer of `command`. */
extern u8 *scratch;

/* data.c: contents of blocks, and the memory of transfers. */

/* Whole pages; whole pages after a shorter first piece; pieces of any length. */
typedef enum { WHOLE, SHIFTED, SMALL, SHAPES } Shape;
/* The content of a block is a function of seed, block and generation, which counts writes. ORIGINAL
 * is the host's content: each 8 bytes are their offset on the disk. FINAL is its complement, which
 * the guest leaves for the host to check. */
enum { ORIGINAL = 0, FINAL = 0xfffffffe, UNKNOWN = 0xffffffff };
extern u64 data_seed;
/* Wrong blocks, pages with changed bytes beside a read's pieces, wrong lengths and
 * indices in the rings, two processors in one ring. */
extern struct Wrong {
    u32 blocks, first, stray_pages, used_lengths, used_indices, collisions;
} wrong;
void pages_start(void);
void pieces_make(Request *, Shape, u32 max_pieces);
void pieces_free(Request *);
void fill(Request *);
void verify(Request *);

/* transfer.c: reads and writes. */
typedef struct {
    int write;
    u64 block;
    u32 blocks;
    Shape shape;
    u32 max_pieces;
    int cdb_length; /* 6, 10, 12 or 16; 0 is 10 */
    int fua;
} Transfer;
/* Results of the requests since `io_clear`. */
extern struct Outcome {
    u32 done, failed, lost, twice, short_ones, last_status, last_sense;
} io;
void io_clear(void);
int io_good(void);
/* A check that passes if all requests since `io_clear` were good. */
void io_check(const char *name);
void transfer(Request *, Transfer);
/* Judges a completed request; 0 if it was repeated after a unit attention. */
int judge(Request *);
/* Waits for the first `count` requests, and judges them. */
void wait_all(u32 count);
/* One transfer from start to end. */
void one(Transfer);
/* Fails a check and ends the machine: a request that did not end may still write to memory. */
void give_up(const char *name);
u32 sense_of(const Request *);

/* command.c: other commands and functions, one at a time. */
extern struct Answer {
    int complete; /* exactly once */
    u8 status;    /* SrbStatus */
    u32 length, sense;
} answer;
/* The target of `command`; both are 0 by default. */
extern u8 address_target, address_lun;
/* Sends a CDB of these bytes with `length` bytes of data in `scratch`; returns success. */
int command(u32 direction, u32 length, int cdb_length, ...);
/* Sends another function of an SRB, such as a reset. */
int srb_function(u32 function);
int adapter_control(SCSI_ADAPTER_CONTROL_TYPE);
void big_endian(u8 *to, u64 value, int bytes);
u64 from_big_endian(const u8 *from, int bytes);

/* main.c */
/* Starts the driver of this run again after its removal. */
int driver_start(void);

/* The checks: identify.c, mode.c, load.c, unmap.c, recover.c,
 * together.c, remove.c, saved.c. */
void inquiry(void);
void capacity(void);
void class_commands(void);
void optional_commands(void);
void absent_addresses(void);
void mode_pages(void);
void write_cache(void);
void original(void);
void read_only(void);
void sizes(void);
void longest(void);
void force_unit_access(void);
void synchronize(void);
void other_cdbs(void);
void mixed_polled(void);
void mixed4(void);
void mixed32(void);
void mixed128(void);
void flood(void);
/* A random request in slice `number` of the disk. */
void start_random(u32 number, u32 slice, u32 max_blocks);
/* Waits until one of the first `depth` requests is done. */
void wait_for_any(const char *name, u32 depth);
void together(void);
void everything(void);
void final(void);
void unmap(void);
/* Unmaps `ranges` stripes from `first` on, except for a margin at both ends of each. */
int send_unmap(u32 first, u32 ranges);
/* The number of blocks; 0 if the command failed. */
u64 read_capacity(void);
void grow(void);
void resets(void);
void removals(void);
void restart(void);
void saved(void);

#endif
