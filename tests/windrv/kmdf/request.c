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
    request->queue = queue;
    request->state = WAITING;
    request->next = NULL;
    if (queue->last)
        queue->last->next = request;
    else
        queue->first = request;
    queue->last = request;
}

static void send(Queue *queue, Request *request, u8 *buffer, size_t length)
{
    Request fresh = {.object = request->object, .kind = request->kind, .code = request->code};
    *request = fresh;
    request->buffer = buffer;
    request->length = length;
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
    request->state = DONE;
    request->cancel = NULL;
    request->completions++;
    request->status = status;
    request->information = information;
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

static int present(Queue *queue)
{
    int any = 0;
    while (queue->powered && queue->first &&
           !(queue->config.DispatchType == WdfIoQueueDispatchSequential && queue->owned)) {
        Request *request = take_first(queue);
        any = 1;
        if (!request->length && !queue->config.AllowZeroLengthRequests) {
            done(request, STATUS_SUCCESS, 0);
            continue;
        }
        request->state = OWNED;
        request->cancelled = 0;
        queue->owned++;
        call(queue, request);
    }
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
    for (Queue *queue = every_queue; queue; queue = queue->next)
        queue->powered &= queue->device != device;
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
        mistakes.requests++;
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
    mistakes.requests += request->cancel != NULL;
    if (request->cancelled)
        return STATUS_CANCELLED;
    request->cancel = cancel;
    return STATUS_SUCCESS;
}

NTSTATUS WdfRequestUnmarkCancelable(WDFREQUEST handle)
{
    Request *request = owned(handle);
    if (request->cancelled)
        return STATUS_CANCELLED;
    mistakes.requests += request->cancel == NULL;
    request->cancel = NULL;
    return STATUS_SUCCESS;
}

void kmdf_cancel(Request *request)
{
    if (request->state == WAITING) {
        Request **at = &request->queue->first;
        while (*at != request)
            at = &(*at)->next;
        *at = request->next;
        request->queue->last = NULL;
        for (Request *it = request->queue->first; it; it = it->next)
            request->queue->last = it;
        done(request, STATUS_CANCELLED, 0);
    } else if (request->state == OWNED) {
        request->cancelled = 1;
        if (request->cancel)
            request->cancel((WDFREQUEST)request);
    }
}

VOID WdfRequestCompleteWithInformation(WDFREQUEST handle, NTSTATUS status, ULONG_PTR information)
{
    Request *request = owned(handle);
    level_at_most(DISPATCH_LEVEL, "WdfRequestComplete");
    /* The request of a file that opens is in no queue. */
    if (request->queue)
        request->queue->owned--;
    done(request, status, information);
}

VOID WdfRequestComplete(WDFREQUEST handle, NTSTATUS status)
{
    WdfRequestCompleteWithInformation(handle, status, 0);
}

/* With `again`, the request goes back to its queue, as its first one. */
VOID WdfRequestStopAcknowledge(WDFREQUEST handle, BOOLEAN again)
{
    Request *request = owned(handle);
    mistakes.requests += request->state != STOPPING;
    request->state = OWNED;
    if (!again)
        return;
    Queue *queue = request->queue;
    queue->owned--;
    request->state = WAITING;
    request->next = queue->first;
    queue->first = request;
    if (!queue->last)
        queue->last = request;
}

WDFQUEUE WdfRequestGetIoQueue(WDFREQUEST handle)
{
    return (WDFQUEUE)((Request *)object_of(handle, REQUEST))->queue;
}
