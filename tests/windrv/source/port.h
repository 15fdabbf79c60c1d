/* The port driver: the part of StorPort that the miniports and the checks use. */
#ifndef WINDRV_PORT_H
#define WINDRV_PORT_H
#include "machine.h"
#include <storport.h>
#include <srbhelper.h>
#include <scsiwmi.h>
#include "missing.h"

enum { MAX_ADAPTERS = 4, MAX_ELEMENTS = 600 };

typedef struct Adapter Adapter;
typedef enum { IDLE, QUEUED, STARTED, DONE } RequestState;

/* A STORAGE_REQUEST_BLOCK with its parts, and the state that the checks keep. */
typedef struct Request {
    STORAGE_REQUEST_BLOCK *srb;
    SRBEX_DATA_SCSI_CDB16 *command;
    STOR_ADDR_BTL8 *address;
    STOR_SCATTER_GATHER_LIST *list;
    struct Request *next;
    Adapter *adapter;
    RequestState state;
    u32 completions;
    u32 processor; /* where StartIo ran, as reported to the driver */
    u32 owner;     /* the processor that waits for the completion */
    u32 length;    /* requested bytes */
    u8 status;     /* SrbStatus without its flags */
    u8 sense[96];
    /* Only for reads and writes: see transfer.c. */
    int write;
    u64 block;
    u32 blocks, generation;
} Request;

/* How a driver is started. */
typedef struct {
    u32 messages;      /* the maximum of MSI-X messages; 0: INTx */
    u32 processors;    /* the number that the driver sees */
    int polled;        /* no interrupts, as while Windows writes a crash dump */
    u32 withheld_perf; /* STOR_PERF_* flags that this port driver does not offer */
    int together;      /* all of these processors exist, and start and complete requests */
} Mode;

/* The requests that a processor has to start. */
typedef struct {
    Request *first, *last;
} Waiting;

/* Queued requests, and the reasons why they wait. The lock protects all fields. */
typedef struct {
    int lock;
    Waiting waiting[PROCESSORS];
    u32 pending;     /* queued or started */
    u32 outstanding; /* started */
    u32 most_outstanding, started;
    int own; /* each processor starts its own requests; otherwise all take turns */
    u32 turn;
    int paused;
    u64 paused_until; /* microseconds */
    u32 busy_until;   /* completions until the driver wants the next request */
} Queue;

/* Counts of the driver's calls and mistakes. */
typedef struct {
    u32 busy_calls, busy_retries, pauses, pauses_over, resumes, bus_changes, state_changes;
    u32 errors_logged, completed_unknown, completed_twice, lock_errors, unsupported;
} Calls;

/* Calls of HwStartIo on each processor, and the maximum at the same time. */
typedef struct {
    u32 started[PROCESSORS], inside, most_inside;
} Together;

typedef struct {
    STOR_DPC *first, *last;
} Dpcs;

typedef struct {
    u32 flags, first_message, last_message, channels;
} Performance;

struct Adapter {
    HW_INITIALIZATION_DATA hw;
    PORT_CONFIGURATION_INFORMATION config;
    ACCESS_RANGE ranges[6];
    PciAddress pci;
    void *extension; /* HwDeviceExtension */
    void *uncached;
    u32 uncached_length;
    Mode mode;
    Interrupts interrupts;
    Queue queue;
    Calls calls;
    Performance performance;
    HW_PASSIVE_INITIALIZE_ROUTINE *passive;
    Together together;
    Dpcs dpcs[PROCESSORS];
    int stopped; /* no handlers are called */
    int start_lock[PROCESSORS]; /* of each channel */
    int interrupt_lock, message_lock[MAX_MESSAGES];
    u32 queue_depth;
};

typedef ULONG DriverEntry(PVOID, PVOID);

/* adapter.c: finds, starts and stops adapters. */
extern HW_INITIALIZATION_DATA announced;
extern u32 active_processors;
/* NULL, or the step that failed. */
const char *adapter_start(Adapter *, PciAddress, DriverEntry *, Mode);
void adapter_stop(Adapter *);
Adapter *adapter_of(PVOID extension);
void lock(Adapter *, int *which);
void unlock(Adapter *, int *which);
/* All locks of interrupts, as for StorPort's InterruptLock. */
void lock_interrupts(Adapter *);
void unlock_interrupts(Adapter *);
/* The locks of all channels, so that HwStartIo runs nowhere else. */
void lock_channels(Adapter *);
void unlock_channels(Adapter *);

/* queue.c: requests from their start to their completion. */
Request *request_new(Adapter *);
void request_clear(Request *);
void submit(Adapter *, Request *);
/* Calls the handlers of counted interrupts, and the DPCs; whether there was anything to do. */
int poll_adapter(Adapter *);
/* Waits until no request is pending; returns 0 at the time limit. */
int wait_until_idle(Adapter *, u32 seconds);
void complete(Adapter *, PSTORAGE_REQUEST_BLOCK);
/* While the queue is paused, requests wait. Afterwards, all processors start theirs. */
void pause_queue(Adapter *, int paused);
/* Ends a request that the driver will not complete, because it was stopped or removed. */
void end_by_port(Adapter *, Request *, u8 status);

#endif
