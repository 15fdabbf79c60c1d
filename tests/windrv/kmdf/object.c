/* WDF objects: a tree, with contexts and locks; collections. */
#include "kmdf.h"

struct Mistakes mistakes;
static int tree_lock;

void *object_of(PVOID handle, Kind kind)
{
    Object *object = handle;
    if (!object || object->kind != kind) {
        print("fail object: a handle of kind %u is %p of kind %u\n", kind, handle,
              object ? object->kind : 0);
        machine_end();
    }
    return object;
}

static Context *add_context(Object *object, const WDF_CONTEXT_TYPE *type)
{
    Context *context = pool_allocate(sizeof *context + type->size, 16);
    memset(context, 0, sizeof *context + type->size);
    context->type = type;
    context->next = object->contexts;
    object->contexts = context;
    return context;
}

static Context *find_context(Object *object, const WDF_CONTEXT_TYPE *type)
{
    for (Context *it = object->contexts; it; it = it->next)
        if (strlen(it->type->name) == strlen(type->name) &&
            !memcmp(it->type->name, type->name, strlen(type->name)))
            return it;
    return NULL;
}

void *object_new(Kind kind, size_t size, void *parent, PWDF_OBJECT_ATTRIBUTES attributes)
{
    Object *object = pool_allocate(size, 16);
    memset(object, 0, size);
    object->kind = kind;
    if (attributes) {
        object->cleanup = attributes->EvtCleanupCallback;
        object->destroy = attributes->EvtDestroyCallback;
        if (attributes->ParentObject)
            parent = attributes->ParentObject;
        if (attributes->ContextTypeInfo)
            add_context(object, attributes->ContextTypeInfo);
    }
    object->parent = parent;
    if (object->parent) {
        spin_lock(&tree_lock);
        object->next_sibling = object->parent->first_child;
        object->parent->first_child = object;
        spin_unlock(&tree_lock);
    }
    return object;
}

PVOID WdfObjectGetContext(WDFOBJECT handle, const WDF_CONTEXT_TYPE *type)
{
    Context *context = find_context(handle, type);
    return context ? context->memory : NULL;
}

NTSTATUS WdfObjectAllocateContext(WDFOBJECT handle, PWDF_OBJECT_ATTRIBUTES attributes,
                                  PVOID *memory)
{
    Context *found = find_context(handle, attributes->ContextTypeInfo);
    *memory = (found ? found : add_context(handle, attributes->ContextTypeInfo))->memory;
    return found ? STATUS_OBJECT_NAME_EXISTS : STATUS_SUCCESS;
}

static void unlink_child(Object *object)
{
    if (!object->parent)
        return;
    spin_lock(&tree_lock);
    Object **at = &object->parent->first_child;
    while (*at && *at != object)
        at = &(*at)->next_sibling;
    if (*at)
        *at = object->next_sibling;
    spin_unlock(&tree_lock);
}

/* Children go before their parents. */
VOID WdfObjectDelete(WDFOBJECT handle)
{
    Object *object = handle;
    object_of(object, object->kind == DEAD ? DRIVER : object->kind);
    while (object->first_child)
        WdfObjectDelete(object->first_child);
    if (object->cleanup)
        object->cleanup(object);
    if (object->destroy)
        object->destroy(object);
    unlink_child(object);
    if (object->kind == WORK_ITEM)
        work_item_forget(object);
    if (object->kind == COMMON_BUFFER)
        pool_free(WdfCommonBufferGetAlignedVirtualAddress((WDFCOMMONBUFFER)object));
    while (object->contexts) {
        Context *context = object->contexts;
        object->contexts = context->next;
        pool_free(context);
    }
    object->kind = DEAD;
    pool_free(object);
}

/* Locks. One that this processor has already is a deadlock in Windows. */

static void acquire(Object *object)
{
    count_if(!spin_lock(&object->locked), &mistakes.locks);
}

static void release(Object *object)
{
    count_if(!spin_unlock(&object->locked), &mistakes.locks);
}

/* The drivers' devices have the passive execution level, so that this lock is a mutex. */
VOID WdfObjectAcquireLock(WDFOBJECT handle)
{
    level_at_most(PASSIVE_LEVEL, "WdfObjectAcquireLock");
    acquire(handle);
}

VOID WdfObjectReleaseLock(WDFOBJECT handle)
{
    release(handle);
}

typedef struct {
    Object object;
    KIRQL before;
} Lock;

NTSTATUS WdfSpinLockCreate(PWDF_OBJECT_ATTRIBUTES attributes, WDFSPINLOCK *handle)
{
    *handle = object_new(LOCK, sizeof(Lock), NULL, attributes);
    return STATUS_SUCCESS;
}

VOID WdfSpinLockAcquire(WDFSPINLOCK handle)
{
    Lock *lock = object_of(handle, LOCK);
    level_at_most(DISPATCH_LEVEL, "WdfSpinLockAcquire");
    KIRQL before = irql;
    irql = DISPATCH_LEVEL;
    acquire(&lock->object);
    lock->before = before;
}

VOID WdfSpinLockRelease(WDFSPINLOCK handle)
{
    Lock *lock = object_of(handle, LOCK);
    KIRQL before = lock->before;
    release(&lock->object);
    irql = before;
}

/* A thread that waits for this lock lets the others run. */
NTSTATUS WdfWaitLockCreate(PWDF_OBJECT_ATTRIBUTES attributes, WDFWAITLOCK *handle)
{
    *handle = object_new(WAIT_LOCK, sizeof(Object), NULL, attributes);
    return STATUS_SUCCESS;
}

NTSTATUS WdfWaitLockAcquire(WDFWAITLOCK handle, PLONGLONG)
{
    Object *lock = object_of(handle, WAIT_LOCK);
    level_at_most(PASSIVE_LEVEL, "WdfWaitLockAcquire");
    int me = this_processor() + 1, free = 0;
    while (!__atomic_compare_exchange_n(&lock->locked, &free, me, 0, __ATOMIC_ACQUIRE,
                                        __ATOMIC_RELAXED)) {
        free = 0;
        pause_here();
    }
    return STATUS_SUCCESS;
}

VOID WdfWaitLockRelease(WDFWAITLOCK handle)
{
    release(object_of(handle, WAIT_LOCK));
}

/* Lookaside lists, which keep nothing. Their memory belongs to the driver. */

typedef struct {
    Object object;
    size_t size;
} Lookaside;
typedef struct {
    Object object;
    size_t size;
    u64 bytes[];
} Memory;

NTSTATUS WdfLookasideListCreate(PWDF_OBJECT_ATTRIBUTES attributes, size_t size, POOL_TYPE,
                                PWDF_OBJECT_ATTRIBUTES, ULONG, WDFLOOKASIDE *handle)
{
    Lookaside *list = object_new(LOOKASIDE, sizeof *list, driver_object(), attributes);
    list->size = size;
    *handle = (WDFLOOKASIDE)list;
    return STATUS_SUCCESS;
}

NTSTATUS WdfMemoryCreateFromLookaside(WDFLOOKASIDE handle, WDFMEMORY *memory)
{
    Lookaside *list = object_of(handle, LOOKASIDE);
    level_at_most(DISPATCH_LEVEL, "WdfMemoryCreateFromLookaside");
    Memory *it = object_new(MEMORY, sizeof *it + list->size, list, NULL);
    it->size = list->size;
    *memory = (WDFMEMORY)it;
    return STATUS_SUCCESS;
}

PVOID WdfMemoryGetBuffer(WDFMEMORY handle, size_t *size)
{
    Memory *it = object_of(handle, MEMORY);
    if (size)
        *size = it->size;
    return it->bytes;
}

/* Collections. */

enum { MAX_ITEMS = 1024 };
typedef struct {
    Object object;
    u32 count;
    WDFOBJECT items[MAX_ITEMS];
} Collection;

NTSTATUS WdfCollectionCreate(PWDF_OBJECT_ATTRIBUTES attributes, WDFCOLLECTION *handle)
{
    *handle = object_new(COLLECTION, sizeof(Collection), NULL, attributes);
    return STATUS_SUCCESS;
}

NTSTATUS WdfCollectionAdd(WDFCOLLECTION handle, WDFOBJECT item)
{
    Collection *it = object_of(handle, COLLECTION);
    if (it->count == MAX_ITEMS)
        return STATUS_INSUFFICIENT_RESOURCES;
    it->items[it->count++] = item;
    return STATUS_SUCCESS;
}

ULONG WdfCollectionGetCount(WDFCOLLECTION handle)
{
    return ((Collection *)object_of(handle, COLLECTION))->count;
}

WDFOBJECT WdfCollectionGetItem(WDFCOLLECTION handle, ULONG number)
{
    Collection *it = object_of(handle, COLLECTION);
    return number < it->count ? it->items[number] : NULL;
}

VOID WdfCollectionRemove(WDFCOLLECTION handle, WDFOBJECT item)
{
    Collection *it = object_of(handle, COLLECTION);
    u32 at = 0;
    while (at < it->count && it->items[at] != item)
        at++;
    mistakes.requests += at == it->count;
    if (at == it->count)
        return;
    memmove(&it->items[at], &it->items[at + 1], (it->count - at - 1) * sizeof *it->items);
    it->count--;
}
