/* Interrupt request levels, events, threads, work items. Nothing is preempted: handlers, DPCs, work
 * items and threads run while a check waits. Threads run on the first processor. */
#include "kmdf.h"

#pragma GCC diagnostic ignored "-Wattributes"

KIRQL levels[PROCESSORS];
enum { MAX_THREADS = 16, STACK = 128 << 10, MAX_WAIT_SECONDS = 60, SHOWN = 10 };

void level_at_most(KIRQL highest, const char *what)
{
    if (irql <= highest)
        return;
    if (COUNT(mistakes.levels) < SHOWN)
        print("# level: %s at %u\n", what, irql);
}

void kmdf_paged_code(const char *function)
{
    level_at_most(APC_LEVEL, function);
}

KIRQL kmdf_irql(void)
{
    return irql;
}

/* Threads: each runs until it waits, and then goes back to the main thread. */

typedef struct {
    DISPATCHER_HEADER header;
    u64 stack_pointer;
    int finished;
    PKSTART_ROUTINE routine;
    PVOID context;
} Thread;
static Thread threads[MAX_THREADS];
static u32 thread_count, waits_over;
static Thread *current;
static u64 main_stack_pointer;

/* Saves what a function must preserve, and continues another stack. */
void thread_switch(u64 *from, u64 to);
__asm__(".globl thread_switch\n"
        "thread_switch:\n"
        "push %rbx; push %rbp; push %rsi; push %rdi\n"
        "push %r12; push %r13; push %r14; push %r15\n"
        "mov %rsp, (%rcx)\n"
        "mov %rdx, %rsp\n"
        "pop %r15; pop %r14; pop %r13; pop %r12\n"
        "pop %rdi; pop %rsi; pop %rbp; pop %rbx\n"
        "ret\n");

static void to_main(void)
{
    Thread *thread = current;
    current = NULL;
    thread_switch(&thread->stack_pointer, main_stack_pointer);
}

NTSTATUS PsTerminateSystemThread(NTSTATUS status)
{
    level_at_most(PASSIVE_LEVEL, "PsTerminateSystemThread");
    current->finished = 1;
    current->header.SignalState = 1;
    waits_over++;
    to_main();
    return status;
}

static void thread_main(void)
{
    current->routine(current->context);
    PsTerminateSystemThread(STATUS_SUCCESS);
}

static Thread *free_thread(void)
{
    for (u32 i = 0; i < thread_count; i++)
        if (threads[i].finished)
            return &threads[i];
    if (thread_count == MAX_THREADS) {
        print("fail thread: more than %u threads\n", MAX_THREADS);
        machine_end();
    }
    Thread *thread = &threads[thread_count++];
    thread->stack_pointer = (u64)allocate(STACK, 4096);
    return thread;
}

static Thread *thread_new(PKSTART_ROUTINE routine, PVOID context)
{
    static u64 stacks[MAX_THREADS];
    Thread *thread = free_thread();
    u64 *stack = &stacks[thread - threads];
    if (!*stack)
        *stack = thread->stack_pointer;
    memset(thread, 0, sizeof *thread);
    thread->routine = routine;
    thread->context = context;
    /* Eight registers, then the address to which the switch returns; the stack is aligned as after
     * a call. */
    u64 *top = (u64 *)(*stack + STACK) - 8;
    top[0] = 0;
    *--top = (u64)thread_main;
    thread->stack_pointer = (u64)(top - 8);
    waits_over++;
    return thread;
}

NTSTATUS PsCreateSystemThread(PHANDLE handle, ULONG, POBJECT_ATTRIBUTES, HANDLE, PCLIENT_ID,
                              PKSTART_ROUTINE routine, PVOID context)
{
    *handle = (HANDLE)thread_new(routine, context);
    return STATUS_SUCCESS;
}

void thread_start(void (*routine)(void *), void *context)
{
    thread_new((PKSTART_ROUTINE)routine, context);
}

static int run_threads(void)
{
    u32 before = waits_over;
    for (u32 i = 0; i < thread_count; i++)
        if (!threads[i].finished) {
            current = &threads[i];
            thread_switch(&main_stack_pointer, current->stack_pointer);
        }
    return waits_over != before;
}

/* Waits and events. */

/* Inline functions of the header use it, so that it cannot have its own name. */
static VOID initialize_event(PRKEVENT event, EVENT_TYPE type, BOOLEAN state)
{
    memset(event, 0, sizeof *event);
    event->Header.Type = type;
    event->Header.SignalState = state;
}

static int take(DISPATCHER_HEADER *header)
{
    if (header->SignalState <= 0)
        return 0;
    if (header->Type == SynchronizationEvent)
        header->SignalState = 0;
    waits_over++;
    return 1;
}

void pause_here(void)
{
    if (this_processor()) {
        allow_interrupts();
        device_poll();
    } else if (current)
        to_main();
    else if (!run_everything())
        wait_for_interrupt();
}

NTSTATUS KeWaitForSingleObject(PVOID object, KWAIT_REASON, KPROCESSOR_MODE, BOOLEAN,
                               PLARGE_INTEGER timeout)
{
    u64 limit = MAX_WAIT_SECONDS * 10000000ull, begin = microseconds();
    if (timeout)
        limit = -timeout->QuadPart;
    level_at_most(limit ? APC_LEVEL : DISPATCH_LEVEL, "KeWaitForSingleObject");
    while (!take(object)) {
        if (microseconds() - begin >= limit / 10 && (timeout || !current)) {
            if (timeout)
                return STATUS_TIMEOUT;
            print("fail thread: a wait without a limit took %u seconds\n", MAX_WAIT_SECONDS);
            machine_end();
        }
        pause_here();
    }
    return STATUS_SUCCESS;
}

LONG KeSetEvent(PRKEVENT event, KPRIORITY, BOOLEAN)
{
    LONG before = event->Header.SignalState;
    level_at_most(DISPATCH_LEVEL, "KeSetEvent");
    event->Header.SignalState = 1;
    return before;
}

NTSTATUS KeDelayExecutionThread(KPROCESSOR_MODE, BOOLEAN, PLARGE_INTEGER time)
{
    u64 end = microseconds() + -time->QuadPart / 10;
    level_at_most(APC_LEVEL, "KeDelayExecutionThread");
    while (microseconds() < end)
        pause_here();
    return STATUS_SUCCESS;
}

VOID KeStallExecutionProcessor(ULONG time)
{
    u64 end = microseconds() + time;
    while (microseconds() < end)
        ;
}

int wait_until(int (*done)(void *), void *argument, u64 limit)
{
    u64 begin = microseconds();
    while (!done(argument)) {
        if (microseconds() - begin > limit)
            return 0;
        pause_here();
    }
    return 1;
}

/* Work items. Each runs in a thread, because it may wait for a lock; it may delete itself. */

typedef struct WorkItem {
    Object object;
    EVT_WDF_WORKITEM *run;
    int queued;
    struct WorkItem *next;
} WorkItem;
static WorkItem *work_items;

NTSTATUS WdfWorkItemCreate(PWDF_WORKITEM_CONFIG config, PWDF_OBJECT_ATTRIBUTES attributes,
                           WDFWORKITEM *handle)
{
    WorkItem *item = object_new(WORK_ITEM, sizeof *item, NULL, attributes);
    level_at_most(DISPATCH_LEVEL, "WdfWorkItemCreate");
    item->run = config->EvtWorkItemFunc;
    item->next = work_items;
    work_items = item;
    *handle = (WDFWORKITEM)item;
    return STATUS_SUCCESS;
}

void work_item_forget(Object *object)
{
    WorkItem **at = &work_items;
    while (*at && &(*at)->object != object)
        at = &(*at)->next;
    if (*at)
        *at = (*at)->next;
}

VOID WdfWorkItemEnqueue(WDFWORKITEM handle)
{
    ((WorkItem *)object_of(handle, WORK_ITEM))->queued = 1;
}

static void work(void *context)
{
    WorkItem *item = context;
    item->run((WDFWORKITEM)item);
}

static int runs(const WorkItem *item)
{
    for (u32 i = 0; i < thread_count; i++)
        if (!threads[i].finished && threads[i].routine == (PKSTART_ROUTINE)work &&
            (!item || threads[i].context == item))
            return 1;
    return 0;
}

static int run_work_items(void)
{
    int any = 0;
    for (WorkItem *it = work_items; it; it = it->next)
        if (it->queued && !runs(it)) {
            it->queued = 0;
            thread_start(work, it);
            any = 1;
        }
    return any;
}

static int is_queued(void)
{
    int any = 0;
    for (WorkItem *it = work_items; it; it = it->next)
        any |= it->queued;
    return any;
}

void work_items_finish(void)
{
    while (is_queued() || runs(NULL))
        pause_here();
}

VOID WdfWorkItemFlush(WDFWORKITEM handle)
{
    WorkItem *item = object_of(handle, WORK_ITEM);
    level_at_most(PASSIVE_LEVEL, "WdfWorkItemFlush");
    while (item->queued || runs(item))
        pause_here();
}

WDFOBJECT WdfWorkItemGetParentObject(WDFWORKITEM handle)
{
    return ((WorkItem *)object_of(handle, WORK_ITEM))->object.parent;
}

int run_everything(void)
{
    int any = device_poll();
    any |= ndis_poll();
    any |= run_work_items();
    any |= children_poll();
    any |= queues_present();
    any |= run_threads();
    return any;
}

/* Handles are pointers to the objects, which are never released. */

NTSTATUS ObReferenceObjectByHandle(HANDLE handle, ACCESS_MASK, POBJECT_TYPE, KPROCESSOR_MODE,
                                   PVOID *object, POBJECT_HANDLE_INFORMATION)
{
    *object = handle;
    return STATUS_SUCCESS;
}

LONG_PTR ObfDereferenceObject(PVOID)
{
    return 1;
}

NTSTATUS ZwClose(HANDLE)
{
    return STATUS_SUCCESS;
}

NTSTATUS ZwWaitForSingleObject(HANDLE handle, BOOLEAN alertable, PLARGE_INTEGER timeout)
{
    return KeWaitForSingleObject(handle, Executive, KernelMode, alertable, timeout);
}

KPRIORITY KeSetPriorityThread(PKTHREAD, KPRIORITY)
{
    return 0;
}

#define IMPORT(name) void *__imp_##name = (void *)name
IMPORT(PsTerminateSystemThread);
IMPORT(PsCreateSystemThread);
IMPORT(KeWaitForSingleObject);
void *__imp_KeInitializeEvent = (void *)initialize_event;
IMPORT(KeSetEvent);
IMPORT(KeDelayExecutionThread);
IMPORT(KeStallExecutionProcessor);
IMPORT(ObReferenceObjectByHandle);
IMPORT(ObfDereferenceObject);
IMPORT(ZwClose);
IMPORT(KeSetPriorityThread);
