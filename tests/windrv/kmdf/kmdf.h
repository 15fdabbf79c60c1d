/* The part of KMDF and of the kernel below it that the drivers and the checks use. */
#ifndef WINDRV_KMDF_H
#define WINDRV_KMDF_H
#include "../source/used.h"
#include <wdf.h>

/* object.c: objects, contexts, locks, collections. */

typedef enum {
    DEAD,
    DRIVER,
    DEVICE,
    QUEUE,
    REQUEST,
    INTERRUPT,
    LOCK,
    COLLECTION,
    DMA_ENABLER,
    COMMON_BUFFER,
    TRANSACTION,
    WORK_ITEM,
    OPEN_FILE,
    LOOKASIDE,
    MEMORY,
    WAIT_LOCK,
} Kind;
typedef struct Context {
    const WDF_CONTEXT_TYPE *type;
    struct Context *next;
    u64 memory[];
} Context;
/* The start of every object. */
typedef struct Object {
    Kind kind;
    struct Object *parent, *first_child, *next_sibling;
    Context *contexts;
    EVT_WDF_OBJECT_CONTEXT_CLEANUP *cleanup, *destroy;
    int locked;
} Object;
/* A new object with the context that its attributes ask for. The parent is theirs, or `parent`. */
void *object_new(Kind, size_t size, void *parent, PWDF_OBJECT_ATTRIBUTES);
/* The object of a handle; a handle of another kind, or of a deleted object, ends the machine. */
void *object_of(PVOID handle, Kind);

/* device.c: the driver, which is the parent of what has no other. */
void *driver_object(void);

/* pool.c: the pool and the pages of MDLs. */

/* Freed memory has a pattern, and is reused late, so that writes to it are found. */
void *pool_allocate(u64 length, u64 alignment);
void pool_free(void *);
/* The number of blocks that are in use. */
u32 pool_blocks(void);
/* The number of freed blocks in which something was written. */
u32 pool_damaged(void);

/* memory.c: the machine's pages, MDLs. */

/* Pages of the machine's memory outside of the heap, for MmAllocatePagesForMdlEx. */
void pages_find(void);
typedef struct {
    u64 high; /* pages that the machine has above 4 GiB */
    u64 free, given, given_high;
    u64 not_zero; /* given away, but with content */
    u64 changed;  /* never given away, or taken back, but with other content */
} Pages;
/* Looks at the content of all pages that have been used. */
Pages pages_look(void);
u64 pages_given(void);
/* What the kernel says of memory, besides the number of free pages. */
enum { FILE_CACHE = 78 << 20, DEMAND_ZERO = 1234, PAGE_READS = 56 };
/* Whether Windows' event of low memory is set. */
void pages_low(int);

/* thread.c: interrupt request levels, waits, threads, work items. */

/* The level of this processor. */
extern KIRQL levels[PROCESSORS];
#define irql (levels[this_processor()])
/* Counts calls that Windows forbids at the current level, and prints the first ones. */
void level_at_most(KIRQL, const char *what);
/* Runs handlers, DPCs, work items and threads; whether there was anything to do. */
int run_everything(void);
/* Runs everything until `done` says so; 0 at the time limit. */
int wait_until(int (*done)(void *), void *argument, u64 microseconds);
/* Starts a thread, which runs while the main thread waits; the work items have one each. */
void thread_start(void (*routine)(void *), void *context);
/* Waits a moment: lets everything run, or goes back to the main thread. */
void pause_here(void);
void work_item_forget(Object *);
/* Waits until no work item is queued or runs. */
void work_items_finish(void);

/* device.c: starts and stops a device as Windows does. */

enum { MAX_INTERRUPTS = 4, MAX_RESOURCES = 6 + MAX_MESSAGES };
typedef struct Interrupt {
    Object object;
    WDF_INTERRUPT_CONFIG config;
    u32 number; /* the message; 0 for INTx */
    int lock, connected;
    volatile u32 dpc_queued, dpc_running; /* the processor plus 1 */
} Interrupt;
typedef struct Request Request;
typedef struct Queue {
    Object object;
    struct Device *device;
    WDF_IO_QUEUE_CONFIG config;
    int powered;
    u32 owned; /* requests that the driver has */
    Request *first, *last;
    struct Queue *next;
} Queue;
typedef struct Device {
    Object object;
    PciAddress pci;
    PciBar bars[6];
    u32 bar_count;
    volatile int presents; /* a request is given to its driver: one at a time */
    Interrupts interrupts;
    Interrupt *handlers[MAX_INTERRUPTS];
    u32 handler_count;
    CM_PARTIAL_RESOURCE_DESCRIPTOR resources[MAX_RESOURCES];
    u32 resource_count;
    WDF_PNPPOWER_EVENT_CALLBACKS events;
    Queue *readers, *writers, *controls;
    /* Of a bus: its children. Of a child: its files and its symbolic link. */
    WDF_CHILD_LIST_CONFIG child_config;
    struct Child *children;
    WDF_FILEOBJECT_CONFIG file_config;
    char link[128];
} Device;
typedef NTSTATUS DriverStart(PDRIVER_OBJECT, PUNICODE_STRING);
/* The device that runs; NULL without one. */
extern Device *running;

/* NULL, or the step that failed. `messages` is the maximum of MSI-X messages; 0 is INTx. */
/* With several `processors`, messages are spread over them, and INTx is not on the first one. */
const char *device_start(PciAddress, DriverStart *, u32 messages, u32 processors);
/* To D3 and back, as Windows does for sleep. */
const char *device_sleep(void);
const char *device_wake(void);
/* Removal: orderly, or after the device has vanished. */
const char *device_remove(int surprise);
/* Interrupts of the configuration, as the ISR byte named them. */
extern u32 configuration_causes;
/* INTx interrupts that the device withdrew, because it was switched off. */
extern u32 intx_withdrawn;
/* Runs this processor's handlers and DPCs, unless it does so already, or the gate is closed. */
int device_poll(void);
/* While the gate is closed, no processor runs any. */
void gate_close(void);
void gate_open(void);
/* DPCs of each processor. */
extern u32 dpcs_run[PROCESSORS];
/* Calls the handler of an interrupt that did not come; whether it claims it. */
int handler_claims_nothing(void);
/* What DeviceAdd and CreatePdo say of a new device. */
struct Init {
    WDF_PNPPOWER_EVENT_CALLBACKS events;
    WDF_CHILD_LIST_CONFIG child_config;
    WDF_FILEOBJECT_CONFIG file_config;
    int is_child;
};

/* children.c: the children of a bus, and files. */

/* Creates and starts described children; whether there were any. */
int children_poll(void);
/* Powers the children of the running device up or down; NULL, or the step that failed. */
const char *children_up(void);
const char *children_down(WDF_POWER_DEVICE_STATE, u32 action);
void children_remove(void);
/* The child with this number, which is started; NULL without one. */
Device *child(u32 number);
/* Notifications of a child to programs. */
extern u32 notifications;
typedef struct File File;
/* Opens a device as a program does; NULL with the driver's status if it refuses. */
File *file_open(Device *, NTSTATUS *);
void file_close(File *);

/* ndis/interrupts.c */
int ndis_poll(void);

/* request.c: requests of the checks. */

struct Request {
    Object object;
    Queue *queue;
    Request *next;
    enum { FREE, WAITING, OWNED, STOPPING, DONE } state;
    enum { READ, WRITE, CONTROL } kind;
    ULONG code; /* of CONTROL */
    u8 *buffer;
    size_t length;
    EVT_WDF_REQUEST_CANCEL *cancel;
    int cancelled;
    u32 sender; /* the processor that sent it, and waits for it */
    /* After completion: */
    u32 completions;
    NTSTATUS status;
    u64 information;
};
Request *kmdf_request(void);
void kmdf_requests_free(void);
/* Sends a request to a device. */
void kmdf_read(Device *, Request *, u8 *buffer, size_t length);
void kmdf_write(Device *, Request *, u8 *buffer, size_t length);
void kmdf_control(Device *, Request *, ULONG code, u8 *buffer, size_t length);
void kmdf_cancel(Request *);
/* Waits on any processor until all of these requests are done; 0 at the time limit. */
int kmdf_await(Request *const requests[], u32 number, u64 microseconds);
/* Gives waiting requests to the driver. */
int queues_present(void);
/* Calls EvtIoStop of all requests that the device's driver has; 0 if it keeps one. */
int queues_stop(Device *, u32 action);
void queues_start(Device *);
/* Ends all requests that the device's driver does not have. */
void queues_purge(Device *);

/* Mistakes of the driver, or of the shim. */
extern struct Mistakes {
    u32 levels, locks, requests, unsupported;
} mistakes;
static inline void count_if(int it, u32 *counter)
{
    if (it)
        COUNT(*counter);
}

/* The checks. */
void kmdf_check_rng(void);
void kmdf_check_balloon(void);
void kmdf_removed_balloon(void);
void kmdf_prepare_serial(void);
void kmdf_check_serial(void);

/* kmdf/main.c */
void kmdf_run(void);
#endif
