/* Interrupts and deferred procedures of the adapter. In the modes `smp…`, each processor takes
 * its messages and runs its procedures. In the others, processors are only numbers: there is one,
 * and a deferred procedure runs as if on the processor for which it was queued. */
#include "intel.h"

#pragma GCC diagnostic ignored "-Wattributes"

enum { MAX_DEFERRED = 64, DEVICE_LEVEL = 5, DEFAULT_THROTTLE = 64 };
typedef struct {
    u32 message, processor;
    KDPC *dpc; /* the driver's own; otherwise NDIS' of a message */
} Queued;
static struct DeferredQueue {
    int lock;
    u32 count, running;
    Queued list[MAX_DEFERRED];
} queues[PROCESSORS];
static NDIS_MINIPORT_INTERRUPT_CHARACTERISTICS handlers;
static NDIS_HANDLE handler_context;
static struct {
    IO_INTERRUPT_MESSAGE_INFO info;
    IO_INTERRUPT_MESSAGE_INFO_ENTRY more[MAX_MESSAGES];
} table;
static int message_locks[MAX_MESSAGES];
static u32 processors = 1;
static int together;
Deferred deferred;
u32 throttle = DEFAULT_THROTTLE;
/* Where there is only one: the processor as which it acts. */
static u32 acts_as;

u32 current_processor(void)
{
    return together ? this_processor() : acts_as;
}

KIRQL ndis_raise(KIRQL level)
{
    KIRQL before = irql;
    if (before < level)
        irql = level;
    return before;
}

void ndis_lower(KIRQL level)
{
    count_if(level > irql, &mistakes.levels);
    irql = level;
}

ULONG ndis_processor(PPROCESSOR_NUMBER number)
{
    if (number)
        *number = (PROCESSOR_NUMBER){.Number = current_processor()};
    return current_processor();
}

NTSTATUS KeGetProcessorNumberFromIndex(ULONG index, PPROCESSOR_NUMBER number)
{
    *number = (PROCESSOR_NUMBER){.Number = index};
    return index < processors ? STATUS_SUCCESS : STATUS_INVALID_PARAMETER;
}

ULONG KeGetProcessorIndexFromNumber(PPROCESSOR_NUMBER number)
{
    return number->Number < processors ? number->Number : INVALID_PROCESSOR_INDEX;
}

ULONG NdisGroupActiveProcessorCount(USHORT)
{
    return processors;
}

void interrupts_connect(u32 count, int real)
{
    processors = count;
    together = real;
    memset(&table, 0, sizeof table);
    table.info.MessageCount = nic.interrupts.messages;
}

void interrupts_forget(void)
{
    memset(&handlers, 0, sizeof handlers);
    memset(queues, 0, sizeof queues);
    acts_as = 0;
    throttle = DEFAULT_THROTTLE;
    memset(&deferred, 0, sizeof deferred);
}

NDIS_STATUS NdisMRegisterInterruptEx(NDIS_HANDLE, NDIS_HANDLE context,
                                     NDIS_MINIPORT_INTERRUPT_CHARACTERISTICS *it,
                                     PNDIS_HANDLE handle)
{
    level_at_most(PASSIVE_LEVEL, "NdisMRegisterInterruptEx");
    it->InterruptType = NDIS_CONNECT_LINE_BASED;
    if (nic.interrupts.messages && it->MsiSupported) {
        it->InterruptType = NDIS_CONNECT_MESSAGE_BASED;
        it->MessageInfoTable = &table.info;
    }
    handlers = *it;
    handler_context = context;
    *handle = &handlers;
    return NDIS_STATUS_SUCCESS;
}

static u32 deferred_pending(void)
{
    u32 count = 0;
    for (u32 i = 0; i < PROCESSORS; i++)
        count += queues[i].count + queues[i].running;
    return count;
}

int deferred_have_run(void *)
{
    return !deferred_pending();
}

VOID NdisMDeregisterInterruptEx(NDIS_HANDLE)
{
    level_at_most(PASSIVE_LEVEL, "NdisMDeregisterInterruptEx");
    do {
        ndis_poll();
    } while (together && deferred_pending());
    processors_hold();
    memset(&handlers, 0, sizeof handlers);
    memset(queues, 0, sizeof queues);
    processors_release();
}

BOOLEAN NdisMSynchronizeWithInterruptEx(NDIS_HANDLE, ULONG message,
                                        MINIPORT_SYNCHRONIZE_INTERRUPT_HANDLER handler, PVOID it)
{
    int *lock = &message_locks[message % MAX_MESSAGES];
    KIRQL before = ndis_raise(DEVICE_LEVEL);
    count_if(!spin_lock(lock), &mistakes.locks);
    BOOLEAN done = handler(it);
    count_if(!spin_unlock(lock), &mistakes.locks);
    irql = before;
    return done;
}

/* Deferred procedures. */

static BOOLEAN is_queued(const struct DeferredQueue *queue, const Queued *it)
{
    for (u32 i = 0; i < queue->count; i++)
        if (!memcmp(&queue->list[i], it, sizeof *it))
            return TRUE;
    return FALSE;
}

static BOOLEAN defer(Queued it)
{
    u32 where = together ? it.processor : 0;
    struct DeferredQueue *queue = &queues[where];
    spin_lock(&queue->lock);
    BOOLEAN is_new = !is_queued(queue, &it);
    if (is_new && queue->count == MAX_DEFERRED) {
        print("fail netkvm: more than %u deferred procedures\n", MAX_DEFERRED);
        machine_end();
    }
    if (is_new)
        queue->list[queue->count++] = it;
    spin_unlock(&queue->lock);
    if (is_new && where != this_processor()) {
        COUNT(deferred.elsewhere);
        processor_wake(where);
    }
    return is_new;
}

static int take_deferred(struct DeferredQueue *queue, Queued *it)
{
    spin_lock(&queue->lock);
    u32 count = queue->count;
    if (count) {
        *it = queue->list[0];
        memmove(queue->list, queue->list + 1, --queue->count * sizeof *it);
    }
    queue->running = count != 0;
    spin_unlock(&queue->lock);
    return count != 0;
}

ULONG NdisMQueueDpcEx(NDIS_HANDLE, ULONG message, PGROUP_AFFINITY where, PVOID)
{
    ULONG number = __builtin_ctzll(where->Mask);
    if (!where->Mask || (where->Mask & (where->Mask - 1)) || number >= processors) {
        COUNT(mistakes.requests);
        return 0;
    }
    if (irql == DISPATCH_LEVEL)
        COUNT(deferred.again);
    defer((Queued){.message = message, .processor = number});
    return where->Mask;
}

/* Inline functions of the header use it, so that it cannot have its own name. */
static VOID initialize_dpc(PRKDPC dpc, PKDEFERRED_ROUTINE routine, PVOID context)
{
    memset(dpc, 0, sizeof *dpc);
    dpc->DeferredRoutine = routine;
    dpc->DeferredContext = context;
}

BOOLEAN KeInsertQueueDpc(PRKDPC dpc, PVOID, PVOID)
{
    if (__atomic_exchange_n(&dpc->DpcData, dpc, __ATOMIC_ACQUIRE))
        return FALSE;
    return defer((Queued){.processor = current_processor(), .dpc = dpc});
}

static void run_deferred(Queued it)
{
    NDIS_RECEIVE_THROTTLE_PARAMETERS limits = {.MaxNblsToIndicate = throttle};
    u32 before = acts_as, inside = COUNT(deferred.inside) + 1;
    irql = DISPATCH_LEVEL;
    if (!together)
        acts_as = it.processor;
    if (inside > deferred.most_inside)
        deferred.most_inside = inside;
    COUNT(deferred.total);
    if (it.dpc) {
        __atomic_store_n(&it.dpc->DpcData, NULL, __ATOMIC_RELEASE);
        it.dpc->DeferredRoutine(it.dpc, it.dpc->DeferredContext, NULL, NULL);
    } else if (handlers.InterruptType == NDIS_CONNECT_MESSAGE_BASED) {
        COUNT(deferred.by_message[it.message]);
        handlers.MessageInterruptDpcHandler(handler_context, it.message, NULL, &limits, NULL);
    } else {
        handlers.InterruptDpcHandler(handler_context, NULL, &limits, NULL);
    }
    __atomic_fetch_sub(&deferred.inside, 1, __ATOMIC_RELAXED);
    count_if(irql != DISPATCH_LEVEL, &mistakes.levels);
    irql = PASSIVE_LEVEL;
    if (!together)
        acts_as = before;
}

static int service_message(u32 message)
{
    BOOLEAN dpc = FALSE;
    ULONG targets = 0;
    irql = DEVICE_LEVEL;
    if (!together)
        acts_as = message / MESSAGES_OF_A_PROCESSOR % processors;
    count_if(!spin_lock(&message_locks[message]), &mistakes.locks);
    BOOLEAN claimed = handlers.MessageInterruptHandler(handler_context, message, &dpc, &targets);
    count_if(!spin_unlock(&message_locks[message]), &mistakes.locks);
    irql = PASSIVE_LEVEL;
    if (dpc)
        defer((Queued){.message = message, .processor = current_processor()});
    if (!together)
        acts_as = 0;
    return claimed;
}

static int service_line(void)
{
    BOOLEAN dpc = FALSE;
    ULONG targets = 0;
    irql = DEVICE_LEVEL;
    BOOLEAN claimed = handlers.InterruptHandler(handler_context, &dpc, &targets);
    irql = PASSIVE_LEVEL;
    if (dpc)
        defer((Queued){0});
    return claimed;
}

u32 interrupts_sticky(void)
{
    u32 claimed = 0;
    for (u32 i = 0; i < STICKY_CALLS && !nic.interrupts.messages; i++) {
        service_line();
        claimed += service_line();
    }
    ndis_poll();
    return claimed;
}

static int poll_messages(Interrupts *it)
{
    int any = 0;
    for (u32 message = 0; message < it->messages; message++)
        while (message_arrived(it, message)) {
            any = 1;
            count_if(!service_message(message), &it->unclaimed_messages);
        }
    return any;
}

/* Serves an interrupt of a line. What Intel's card claims alone is not counted, and neither is its
 * second arrival if the interrupt controller ends it before the handlers. */
static void count_line(Interrupts *it, u32 pin)
{
    static u32 again;
    int early = !is_in_service(INTX_VECTOR + pin);
    int of_intel = intel_has_line(pin) && intel_service();
    if (intel_has_line(pin) && !intel_shares_line(nic.pci))
        return;
    int claimed = service_line();
    if (of_intel)
        again = early;
    if (of_intel && !claimed)
        return;
    if (!claimed && again) {
        again = 0;
        return;
    }
    it->intx_fired++;
    it->intx_ended_early += early;
    it->intx_unclaimed += !claimed;
}

static int poll_line(Interrupts *it)
{
    int any = 0;
    for (u32 pin = 0; pin < INTX_PINS; pin++) {
        volatile u32 *count = &interrupt_counts[0][INTX_VECTOR + pin];
        if (!*count)
            continue;
        *count = 0;
        any = 1;
        count_line(it, pin);
        end_of_interrupt_intx();
    }
    return any;
}

/* Does nothing at a level at which interrupts and deferred procedures would have to wait. */
int ndis_poll(void)
{
    int any = 0;
    u32 me = this_processor();
    Queued it;
    if (!handlers.InterruptHandler || irql > APC_LEVEL || (me && !together))
        return 0;
    if (handlers.InterruptType == NDIS_CONNECT_MESSAGE_BASED)
        any = poll_messages(&nic.interrupts);
    else if (!me)
        any = poll_line(&nic.interrupts);
    for (; take_deferred(&queues[me], &it); any = 1)
        run_deferred(it);
    return me ? any : any | run_work_items_ndis();
}

#define IMPORT(name) void *__imp_##name = (void *)name
void *__imp_KeInitializeDpc = (void *)initialize_dpc;
IMPORT(KeInsertQueueDpc);
