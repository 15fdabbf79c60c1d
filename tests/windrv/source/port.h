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
} Mode;

/* Queued requests, and the reasons why they wait. */
typedef struct {
    Request *first, *last;
    u32 outstanding, most_outstanding, started;
    int paused;
    u64 paused_until; /* microseconds */
    u32 busy_until;   /* completions until the driver wants the next request */
} Queue;

/* Counts of the driver's calls and mistakes. */
typedef struct {
    u32 busy_calls, busy_retries, pauses, pauses_over, resumes, bus_changes, state_changes;
    u32 errors_logged, completed_unknown, completed_twice, lock_errors, unsupported;
} Calls;

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
    STOR_DPC *first_dpc, *last_dpc;
    int start_lock, interrupt_lock, message_lock[MAX_MESSAGES];
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

/* queue.c: requests from their start to their completion. */
Request *request_new(Adapter *);
void request_clear(Request *);
void submit(Adapter *, Request *);
/* Calls the handlers of counted interrupts, and the DPCs; whether there was anything to do. */
int poll_adapter(Adapter *);
/* Waits until no request is pending; returns 0 at the time limit. */
int wait_until_idle(Adapter *, u32 seconds);
void complete(Adapter *, PSTORAGE_REQUEST_BLOCK);

#endif
