/* The port driver: what StorPort is to the miniports, as far as they and the checks see it. */
#ifndef WINDRV_PORT_H
#define WINDRV_PORT_H
#include "machine.h"
#include <storport.h>
#include <srbhelper.h>
#include <scsiwmi.h>
#include "missing.h"

enum { MAX_MESSAGES = 32, MAX_ADAPTERS = 4, MAX_ELEMENTS = 600 };

typedef struct Adapter Adapter;
typedef enum { IDLE, QUEUED, STARTED, DONE } RequestState;

/* A STORAGE_REQUEST_BLOCK with its parts, and what the checks remember of it. */
typedef struct Request {
    STORAGE_REQUEST_BLOCK *srb;
    SRBEX_DATA_SCSI_CDB16 *command;
    STOR_ADDR_BTL8 *address;
    STOR_SCATTER_GATHER_LIST *list;
    struct Request *next;
    Adapter *adapter;
    RequestState state;
    u32 completions;
    u32 processor; /* of those that the driver sees: where StartIo ran */
    u32 length;    /* bytes asked for */
    u8 status;     /* SrbStatus without its flags */
    u8 sense[96];
    /* A read or a write: see transfer.c. */
    int write;
    u64 block;
    u32 blocks, generation;
} Request;

/* How a driver is started. */
typedef struct {
    u32 messages;      /* MSI-X messages at most; 0: INTx */
    u32 processors;    /* that the driver sees */
    int polled;        /* no interrupts: as when a crash dump is written */
    u32 withheld_perf; /* STOR_PERF_* flags that this port driver does not offer */
} Mode;

typedef struct {
    u8 capability; /* MSI-X: its place in configuration space */
    volatile u32 *table;
    u32 table_size, messages, first_vector;
    u32 seen[MAX_MESSAGES], fired[MAX_MESSAGES], unclaimed_messages;
    u32 intx_fired, intx_unclaimed;
    u32 intx_ended_early; /* the interrupt controller had ended it before the driver was called */
} Interrupts;

/* Requests that wait, and why. */
typedef struct {
    Request *first, *last;
    u32 outstanding, most_outstanding, started;
    int paused;
    u64 paused_until; /* microseconds */
    u32 busy_until;   /* completions until the driver wants the next request */
} Queue;

/* What the driver did. */
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
/* 0: there is none; 1: its subsystem or revision is not that of the INF; 2: as the INF has it. */
int adapter_find(u16 device, PciAddress *where);
/* NULL, or the step that failed. */
const char *adapter_start(Adapter *, PciAddress, DriverEntry *, Mode);
void adapter_stop(Adapter *);
Adapter *adapter_of(PVOID extension);
void lock(Adapter *, int *which);
void unlock(Adapter *, int *which);

/* messages.c: MSI-X as Windows' PCI driver sets it up. */
void messages_start(Adapter *);

/* queue.c: requests from their start to their completion. */
Request *request_new(Adapter *);
void request_clear(Request *);
void submit(Adapter *, Request *);
/* Calls the handlers of interrupts that came, and the DPCs. Whether there was anything to do. */
int poll_adapter(Adapter *);
/* Waits until no request is pending; 0 after this time. */
int wait_until_idle(Adapter *, u32 seconds);
void complete(Adapter *, PSTORAGE_REQUEST_BLOCK);

#endif
