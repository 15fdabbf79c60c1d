/* Queues and requests. A request is one of: waiting in its queue, owned by the driver, done. */
#include "kmdf.h"

/* The queues of all devices. */
static Queue *every_queue;

NTSTATUS WdfIoQueueCreate(WDFDEVICE device, PWDF_IO_QUEUE_CONFIG config,
                          PWDF_OBJECT_ATTRIBUTES attributes, WDFQUEUE *handle)
{
    Queue *queue = object_new(QUEUE, sizeof *queue, device, attributes);
    queue->device = object_of(device, DEVICE);
    queue->config = *config;
    queue->next = every_queue;
    every_queue = queue;
    *handle = (WDFQUEUE)queue;
    return STATUS_SUCCESS;
}

WDFDEVICE WdfIoQueueGetDevice(WDFQUEUE handle)
{
    return (WDFDEVICE)((Queue *)object_of(handle, QUEUE))->device;
}

NTSTATUS WdfDeviceConfigureRequestDispatching(WDFDEVICE handle, WDFQUEUE queue,
                                              WDF_REQUEST_TYPE type)
{
    Device *device = object_of(handle, DEVICE);
    Queue **place = &device->writers;
    if (type == WdfRequestTypeRead)
        place = &device->readers;
    else if (type == WdfRequestTypeDeviceControl)
        place = &device->controls;
    *place = object_of(queue, QUEUE);
    return STATUS_SUCCESS;
}

/* All requests of the checks. */
enum { MAX_REQUESTS = 512 };
static Request *all[MAX_REQUESTS];
static u32 count;
/* Protects queues, and the states of requests. Drivers are called without it. */
static int list_lock;

Request *kmdf_request(void)
{
    Request *request = object_new(REQUEST, sizeof *request, NULL, NULL);
    if (count == MAX_REQUESTS) {
        print("fail request: more than %u requests\n", count);
        machine_end();
    }
    return all[count++] = request;
}

void kmdf_requests_free(void)
{
    while (count)
        WdfObjectDelete(all[--count]);
}

static void append(Queue *queue, Request *request)
{
    spin_lock(&list_lock);
    request->queue = queue;
    request->state = WAITING;
    request->next = NULL;
    if (queue->last)
        queue->last->next = request;
    else
        queue->first = request;
    queue->last = request;
    spin_unlock(&list_lock);
}

static void send(Queue *queue, Request *request, u8 *buffer, size_t length)
{
    Request fresh = {.object = request->object, .kind = request->kind, .code = request->code};
    *request = fresh;
    request->buffer = buffer;
    request->length = length;
    request->sender = this_processor();
    append(queue, request);
    queues_present();
}

void kmdf_read(Device *device, Request *request, u8 *buffer, size_t length)
{
    request->kind = READ;
    send(device->readers, request, buffer, length);
}

void kmdf_write(Device *device, Request *request, u8 *buffer, size_t length)
{
    request->kind = WRITE;
    send(device->writers, request, buffer, length);
}

void kmdf_control(Device *device, Request *request, ULONG code, u8 *buffer, size_t length)
{
    request->kind = CONTROL;
    request->code = code;
    send(device->controls, request, buffer, length);
}

static Request *take_first(Queue *queue)
{
    Request *request = queue->first;
    queue->first = request->next;
    if (!queue->first)
        queue->last = NULL;
    return request;
}

static void done(Request *request, NTSTATUS status, u64 information)
{
    request->cancel = NULL;
    request->completions++;
    request->status = status;
    request->information = information;
    u32 sender = request->sender;
    __atomic_store_n(&request->state, DONE, __ATOMIC_RELEASE);
    if (sender != this_processor())
        processor_wake(sender);
}

static void call(Queue *queue, Request *request)
{
    WDFREQUEST handle = (WDFREQUEST)request;
    if (request->kind == CONTROL)
        queue->config.EvtIoDeviceControl((WDFQUEUE)queue, handle, request->length, 0,
                                         request->code);
    else if (request->kind == WRITE)
        queue->config.EvtIoWrite((WDFQUEUE)queue, handle, request->length);
    else
        queue->config.EvtIoRead((WDFQUEUE)queue, handle, request->length);
}

/* The next request for the driver; NULL if it must have none. */
static Request *take_next(Queue *queue)
{
    Request *request = NULL;
    int sequential = queue->config.DispatchType == WdfIoQueueDispatchSequential;
    spin_lock(&list_lock);
    while (!request && queue->powered && queue->first && !(sequential && queue->owned)) {
        request = take_first(queue);
        if (!request->length && !queue->config.AllowZeroLengthRequests) {
            done(request, STATUS_SUCCESS, 0);
            request = NULL;
            continue;
        }
        request->state = OWNED;
        request->cancelled = 0;
        queue->owned++;
    }
    spin_unlock(&list_lock);
    return request;
}

/* The drivers ask for one call at a time for each device, or have only one sequential queue. */
static int present(Queue *queue)
{
    int any = 0;
    if (!queue->first || __atomic_exchange_n(&queue->device->presents, 1, __ATOMIC_ACQUIRE))
        return 0;
    for (Request *request; (request = take_next(queue)); any = 1)
        call(queue, request);
    __atomic_store_n(&queue->device->presents, 0, __ATOMIC_RELEASE);
    return any;
}

int queues_present(void)
{
    int any = 0;
    if (irql != PASSIVE_LEVEL)
        return 0;
    for (Queue *queue = every_queue; queue; queue = queue->next)
        any |= present(queue);
    return any;
}

void queues_start(Device *device)
{
    for (Queue *queue = every_queue; queue; queue = queue->next)
        queue->powered |= queue->device == device;
}

int queues_stop(Device *device, u32 action)
{
    int stopped = 1;
    spin_lock(&list_lock);
    for (Queue *queue = every_queue; queue; queue = queue->next)
        queue->powered &= queue->device != device;
    spin_unlock(&list_lock);
    while (device->presents)
        ;
    gate_close();
    for (u32 i = 0; i < count; i++) {
        Request *request = all[i];
        if (request->state != OWNED || request->queue->device != device)
            continue;
        u32 flags = request->cancel ? WdfRequestStopRequestCancelable : 0;
        Queue *queue = request->queue;
        request->state = STOPPING;
        queue->config.EvtIoStop((WDFQUEUE)queue, (WDFREQUEST)request, action | flags);
        stopped &= request->state != STOPPING;
    }
    gate_open();
    return stopped;
}

/* The requests end, and the queues are forgotten. */
void queues_purge(Device *device)
{
    for (Queue **at = &every_queue; *at;) {
        if ((*at)->device != device) {
            at = &(*at)->next;
            continue;
        }
        while ((*at)->first)
            done(take_first(*at), STATUS_CANCELLED, 0);
        *at = (*at)->next;
    }
}

/* What the driver does with a request that it has. */

static Request *owned(WDFREQUEST handle)
{
    Request *request = object_of(handle, REQUEST);
    if (request->state != OWNED && request->state != STOPPING) {
        print("# request %p is used in state %u\n", request, request->state);
        COUNT(mistakes.requests);
    }
    return request;
}

NTSTATUS WdfRequestRetrieveOutputBuffer(WDFREQUEST handle, size_t least, PVOID *buffer,
                                        size_t *length)
{
    Request *request = owned(handle);
    if (request->length < least)
        return STATUS_BUFFER_TOO_SMALL;
    *buffer = request->buffer;
    if (length)
        *length = request->length;
    return STATUS_SUCCESS;
}

NTSTATUS WdfRequestRetrieveInputBuffer(WDFREQUEST handle, size_t least, PVOID *buffer,
                                       size_t *length)
{
    return WdfRequestRetrieveOutputBuffer(handle, least, buffer, length);
}

VOID WdfRequestSetInformation(WDFREQUEST handle, ULONG_PTR information)
{
    owned(handle)->information = information;
}

ULONG_PTR WdfRequestGetInformation(WDFREQUEST handle)
{
    return owned(handle)->information;
}

NTSTATUS WdfRequestMarkCancelableEx(WDFREQUEST handle, EVT_WDF_REQUEST_CANCEL *cancel)
{
    Request *request = owned(handle);
    count_if(request->cancel != NULL, &mistakes.requests);
    spin_lock(&list_lock);
    int cancelled = request->cancelled;
    if (!cancelled)
        request->cancel = cancel;
    spin_unlock(&list_lock);
    return cancelled ? STATUS_CANCELLED : STATUS_SUCCESS;
}

/* A request whose cancellation has begun may be completed meanwhile: the driver knows that. */
NTSTATUS WdfRequestUnmarkCancelable(WDFREQUEST handle)
{
    Request *request = object_of(handle, REQUEST);
    spin_lock(&list_lock);
    int cancelled = request->cancelled, marked = request->cancel != NULL;
    request->cancel = NULL;
    spin_unlock(&list_lock);
    if (cancelled)
        return STATUS_CANCELLED;
    owned(handle);
    count_if(!marked, &mistakes.requests);
    return STATUS_SUCCESS;
}

static void forget_waiting(Request *request)
{
    Request **at = &request->queue->first;
    while (*at != request)
        at = &(*at)->next;
    *at = request->next;
    request->queue->last = NULL;
    for (Request *it = request->queue->first; it; it = it->next)
        request->queue->last = it;
    done(request, STATUS_CANCELLED, 0);
}

void kmdf_cancel(Request *request)
{
    EVT_WDF_REQUEST_CANCEL *cancel = NULL;
    spin_lock(&list_lock);
    if (request->state == WAITING) {
        forget_waiting(request);
    } else if (request->state == OWNED) {
        request->cancelled = 1;
        cancel = request->cancel;
    }
    spin_unlock(&list_lock);
    if (cancel)
        cancel((WDFREQUEST)request);
}

VOID WdfRequestCompleteWithInformation(WDFREQUEST handle, NTSTATUS status, ULONG_PTR information)
{
    Request *request = owned(handle);
    level_at_most(DISPATCH_LEVEL, "WdfRequestComplete");
    spin_lock(&list_lock);
    /* The request of a file that opens is in no queue. */
    if (request->queue)
        request->queue->owned--;
    done(request, status, information);
    spin_unlock(&list_lock);
}

VOID WdfRequestComplete(WDFREQUEST handle, NTSTATUS status)
{
    WdfRequestCompleteWithInformation(handle, status, 0);
}

/* With `again`, the request goes back to its queue, as its first one. */
VOID WdfRequestStopAcknowledge(WDFREQUEST handle, BOOLEAN again)
{
    Request *request = owned(handle);
    count_if(request->state != STOPPING, &mistakes.requests);
    request->state = OWNED;
    if (!again)
        return;
    spin_lock(&list_lock);
    Queue *queue = request->queue;
    queue->owned--;
    request->state = WAITING;
    request->next = queue->first;
    queue->first = request;
    if (!queue->last)
        queue->last = request;
    spin_unlock(&list_lock);
}

static int are_done(Request *const requests[], u32 number)
{
    for (u32 i = 0; i < number; i++)
        if (__atomic_load_n(&requests[i]->state, __ATOMIC_ACQUIRE) != DONE)
            return 0;
    return 1;
}

int kmdf_await(Request *const requests[], u32 number, u64 limit)
{
    u64 end = microseconds() + limit;
    while (!are_done(requests, number)) {
        allow_interrupts();
        if (device_poll() | queues_present())
            continue;
        if (microseconds() > end)
            return 0;
        wait_for_interrupt();
    }
    return 1;
}

WDFQUEUE WdfRequestGetIoQueue(WDFREQUEST handle)
{
    return (WDFQUEUE)((Request *)object_of(handle, REQUEST))->queue;
}
