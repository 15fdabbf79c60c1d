/* Requests: made, started when the driver accepts them, and completed. */
#include "port.h"

Request *request_new(Adapter *adapter)
{
    Request *request = allocate(sizeof *request, 16);
    u32 address = sizeof(STORAGE_REQUEST_BLOCK);
    u32 command = (address + sizeof(STOR_ADDR_BTL8) + 7) & ~7u;
    u8 *srb = allocate(command + sizeof(SRBEX_DATA_SCSI_CDB16), 16);
    request->srb = (STORAGE_REQUEST_BLOCK *)srb;
    request->address = (STOR_ADDR_BTL8 *)(srb + address);
    request->command = (SRBEX_DATA_SCSI_CDB16 *)(srb + command);
    request->srb->MiniportContext = allocate(adapter->hw.SrbExtensionSize, 64);
    STOR_SCATTER_GATHER_LIST *list = NULL;
    request->list = allocate(sizeof *list + MAX_ELEMENTS * sizeof list->List[0], 16);
    request->adapter = adapter;
    return request;
}

/* Resets a request. The SRB extension keeps the driver's old content, as in Windows. */
void request_clear(Request *request)
{
    STORAGE_REQUEST_BLOCK *srb = request->srb;
    PVOID extension = srb->MiniportContext;
    memset(srb, 0, sizeof *srb);
    memset(request->address, 0, sizeof *request->address);
    memset(request->command, 0, sizeof *request->command);
    memset(request->sense, 0, sizeof request->sense);
    srb->Length = FIELD_OFFSET(STORAGE_REQUEST_BLOCK, SrbExDataOffset) + 4;
    srb->Function = SRB_FUNCTION_STORAGE_REQUEST_BLOCK;
    srb->Signature = SRB_SIGNATURE;
    srb->Version = STORAGE_REQUEST_BLOCK_VERSION_1;
    srb->SrbLength = (u8 *)(request->command + 1) - (u8 *)srb;
    srb->TimeOutValue = 30;
    srb->AddressOffset = (u8 *)request->address - (u8 *)srb;
    srb->NumSrbExData = 1;
    srb->SrbExDataOffset[0] = (u8 *)request->command - (u8 *)srb;
    srb->PortContext = request;
    srb->MiniportContext = extension;
    request->address->Type = STOR_ADDRESS_TYPE_BTL8;
    request->address->AddressLength = STOR_ADDR_BTL8_ADDRESS_LENGTH;
    request->command->Type = SrbExDataTypeScsiCdb16;
    request->command->Length = sizeof *request->command - 8;
    request->command->SenseInfoBuffer = request->sense;
    request->command->SenseInfoBufferLength = sizeof request->sense;
    request->list->NumberOfElements = 0;
    request->completions = 0;
    request->state = IDLE;
    request->length = 0;
    request->status = 0xff;
}

static void append(Waiting *waiting, Request *request)
{
    request->next = NULL;
    if (waiting->last)
        waiting->last->next = request;
    else
        waiting->first = request;
    waiting->last = request;
}

/* The next request that this processor may start; NULL if it has to wait. */
static Request *take_next(Adapter *adapter)
{
    Queue *queue = &adapter->queue;
    u32 me = this_processor();
    Waiting *waiting = &queue->waiting[me];
    spin_lock(&queue->lock);
    Request *request = queue->paused || queue->busy_until ? NULL : waiting->first;
    if (request) {
        waiting->first = request->next;
        if (!waiting->first)
            waiting->last = NULL;
        request->state = STARTED;
        request->processor = adapter->mode.together ? me : queue->started;
        queue->started++;
        queue->outstanding++;
        if (queue->outstanding > queue->most_outstanding)
            queue->most_outstanding = queue->outstanding;
    }
    spin_unlock(&queue->lock);
    return request;
}

static int is_reset(u32 function)
{
    return function == SRB_FUNCTION_RESET_BUS || function == SRB_FUNCTION_RESET_DEVICE ||
           function == SRB_FUNCTION_RESET_LOGICAL_UNIT;
}

/* Counts a call of HwStartIo. While each processor starts its own requests, now and then one waits
 * for another, so that they meet within the driver on busy hosts, too. */
static void enter(Adapter *adapter)
{
    enum { OFTEN = 16, WAIT = 10000 };
    Together *it = &adapter->together;
    u32 calls = it->started[this_processor()]++, inside = COUNT(it->inside) + 1;
    u64 end = microseconds() + WAIT;
    while (adapter->queue.own && calls % OFTEN == 0 && inside < 2 && microseconds() < end)
        inside = *(volatile u32 *)&it->inside;
    if (inside > it->most_inside)
        it->most_inside = inside;
}

/* Full duplex: HwBuildIo runs without a lock, HwStartIo without the interrupt lock. Calls of
 * HwStartIo exclude each other on a channel; a reset excludes all others. */
static void start(Adapter *adapter, Request *request)
{
    PSCSI_REQUEST_BLOCK srb = (PSCSI_REQUEST_BLOCK)request->srb;
    int alone = is_reset(request->srb->SrbFunction);
    u32 channels = adapter->performance.channels;
    int *channel = &adapter->start_lock[channels ? request->processor % channels : 0];
    if (adapter->hw.HwBuildIo && !adapter->hw.HwBuildIo(adapter->extension, srb))
        return;
    if (alone)
        lock_channels(adapter);
    else
        lock(adapter, channel);
    enter(adapter);
    adapter->hw.HwStartIo(adapter->extension, srb);
    __atomic_fetch_sub(&adapter->together.inside, 1, __ATOMIC_RELAXED);
    if (alone)
        unlock_channels(adapter);
    else
        unlock(adapter, channel);
}

static void start_requests(Adapter *adapter)
{
    for (Request *request; (request = take_next(adapter));)
        start(adapter, request);
}

void submit(Adapter *adapter, Request *request)
{
    Queue *queue = &adapter->queue;
    u32 me = this_processor(), starter = me;
    request->length = request->srb->DataTransferLength;
    request->owner = me;
    spin_lock(&queue->lock);
    if (adapter->mode.together && !queue->own)
        starter = queue->turn++ % adapter->mode.processors;
    request->state = QUEUED;
    queue->pending++;
    append(&queue->waiting[starter], request);
    spin_unlock(&queue->lock);
    if (starter == me)
        start_requests(adapter);
    else
        processor_wake(starter);
}

/* StorPort starts a request that the driver refused as busy again, before all others. */
static void start_again(Adapter *adapter, Request *request)
{
    Queue *queue = &adapter->queue;
    Waiting *waiting = &queue->waiting[this_processor()];
    adapter->calls.busy_retries++;
    request->completions = 0;
    request->srb->SrbStatus = SRB_STATUS_PENDING;
    request->state = QUEUED;
    queue->pending++;
    request->next = waiting->first;
    waiting->first = request;
    if (!waiting->last)
        waiting->last = request;
    if (!queue->busy_until && queue->outstanding)
        queue->busy_until = 1;
}

/* Ends a request; returns whether other processors may start theirs again. */
static int end_request(Adapter *adapter, Request *request)
{
    Queue *queue = &adapter->queue;
    int was_busy = queue->busy_until;
    queue->outstanding--;
    queue->pending--;
    if (queue->busy_until)
        queue->busy_until--;
    request->status = SRB_STATUS(request->srb->SrbStatus);
    if (request->status == SRB_STATUS_BUSY)
        start_again(adapter, request);
    else
        request->state = DONE;
    return was_busy && !queue->busy_until;
}

void complete(Adapter *adapter, PSTORAGE_REQUEST_BLOCK srb)
{
    Request *request = srb->PortContext;
    if (!request || request->srb != srb || request->adapter != adapter) {
        COUNT(adapter->calls.completed_unknown);
        return;
    }
    /* After the lock is free, the request may be another one. */
    u32 owner = request->owner, me = this_processor();
    spin_lock(&adapter->queue.lock);
    request->completions++;
    int first = request->state == STARTED;
    int go_on = first && end_request(adapter, request);
    spin_unlock(&adapter->queue.lock);
    if (!first)
        COUNT(adapter->calls.completed_twice);
    for (u32 i = 0; adapter->mode.together && i < adapter->mode.processors; i++)
        if (i != me && (go_on || i == owner))
            processor_wake(i);
}

void pause_queue(Adapter *adapter, int paused)
{
    enum { LONG = 600000000 };
    spin_lock(&adapter->queue.lock);
    adapter->queue.paused = paused;
    adapter->queue.paused_until = microseconds() + LONG;
    spin_unlock(&adapter->queue.lock);
    for (u32 i = 1; adapter->mode.together && !paused && i < adapter->mode.processors; i++)
        processor_wake(i);
    start_requests(adapter);
}

void end_by_port(Adapter *adapter, Request *request, u8 status)
{
    Queue *queue = &adapter->queue;
    spin_lock(&queue->lock);
    int started = request->state == STARTED;
    queue->pending--;
    queue->outstanding -= started;
    if (queue->busy_until && started)
        queue->busy_until--;
    request->srb->SrbStatus = request->status = status;
    request->completions++;
    request->state = DONE;
    spin_unlock(&queue->lock);
}

static int call_message_handler(Adapter *adapter, u32 message)
{
    lock(adapter, &adapter->message_lock[message]);
    int claimed = adapter->config.HwMSInterruptRoutine(adapter->extension, message);
    unlock(adapter, &adapter->message_lock[message]);
    return claimed;
}

static int poll_messages(Adapter *adapter)
{
    Interrupts *it = &adapter->interrupts;
    int any = 0;
    for (u32 message = 0; message < it->messages; message++)
        while (message_arrived(it, message)) {
            any = 1;
            if (!call_message_handler(adapter, message))
                COUNT(it->unclaimed_messages);
        }
    return any;
}

static int poll_intx(Adapter *adapter)
{
    Interrupts *it = &adapter->interrupts;
    int any = 0;
    for (u32 pin = 0; pin < INTX_PINS; pin++) {
        volatile u32 *count = &interrupt_counts[0][INTX_VECTOR + pin];
        if (!*count)
            continue;
        *count = 0;
        any = 1;
        it->intx_fired++;
        it->intx_ended_early += !is_in_service(INTX_VECTOR + pin);
        lock(adapter, &adapter->interrupt_lock);
        if (!adapter->hw.HwInterrupt(adapter->extension))
            it->intx_unclaimed++;
        unlock(adapter, &adapter->interrupt_lock);
        end_of_interrupt_intx();
    }
    return any;
}

static int run_dpcs(Adapter *adapter)
{
    Dpcs *dpcs = &adapter->dpcs[this_processor()];
    int any = 0;
    while (dpcs->first) {
        PSTOR_DPC dpc = dpcs->first;
        PVOID one = dpc->Argument1, two = dpc->Argument2;
        dpcs->first = dpc->Next;
        if (!dpcs->first)
            dpcs->last = NULL;
        __atomic_store_n(&dpc->Queued, FALSE, __ATOMIC_RELEASE);
        dpc->Routine(dpc, adapter->extension, one, two);
        any = 1;
    }
    return any;
}

static int end_of_pause(Adapter *adapter)
{
    Queue *queue = &adapter->queue;
    spin_lock(&queue->lock);
    int over = queue->paused && microseconds() > queue->paused_until;
    if (over)
        queue->paused = FALSE;
    adapter->calls.pauses_over += over;
    spin_unlock(&queue->lock);
    return over;
}

int poll_adapter(Adapter *adapter)
{
    if (adapter->stopped)
        return 0;
    int any = poll_messages(adapter);
    if (adapter->mode.polled)
        any |= adapter->hw.HwInterrupt(adapter->extension);
    else if (!adapter->interrupts.messages)
        any |= poll_intx(adapter);
    any |= run_dpcs(adapter);
    any |= end_of_pause(adapter);
    start_requests(adapter);
    return any;
}

/* Prints whether the interrupt or the answer is missing: calls all handlers and looks. */
static void explain_wait(Adapter *adapter)
{
    Queue *queue = &adapter->queue;
    u32 before = queue->outstanding;
    print("# waiting: outstanding=%u queued=%u paused=%u busy=%u dpc=%u", before,
          queue->pending - before, queue->paused, queue->busy_until,
          adapter->dpcs[this_processor()].first != NULL);
    for (u32 message = 0; message < adapter->interrupts.messages; message++)
        call_message_handler(adapter, message);
    if (!adapter->interrupts.messages)
        adapter->hw.HwInterrupt(adapter->extension);
    poll_adapter(adapter);
    print(before > queue->outstanding ? ": an interrupt is missing\n" : ": no answers\n");
}

int wait_until_idle(Adapter *adapter, u32 seconds)
{
    Queue *queue = &adapter->queue;
    u64 end = microseconds() + seconds * 1000000ull;
    while (queue->pending || queue->paused) {
        if (microseconds() > end) {
            explain_wait(adapter);
            return 0;
        }
        if (poll_adapter(adapter))
            continue;
        if (!adapter->mode.polled && (queue->pending || queue->paused))
            wait_for_interrupt();
    }
    return 1;
}
