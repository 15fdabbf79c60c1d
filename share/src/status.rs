//! Status codes of Windows ([MS-ERREF] 2.3) and the codes for errors of the host.

use rustix::io::Errno;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u32);

pub type Answer<T> = Result<T, Status>;

impl Status {
    pub const SUCCESS: Self = Self(0);
    pub const PENDING: Self = Self(0x0000_0103);
    pub const NOTIFY_CLEANUP: Self = Self(0x0000_010b);
    pub const NOTIFY_ENUM_DIR: Self = Self(0x0000_010c);
    pub const BUFFER_OVERFLOW: Self = Self(0x8000_0005);
    pub const NO_MORE_FILES: Self = Self(0x8000_0006);
    pub const INVALID_INFO_CLASS: Self = Self(0xc000_0003);
    pub const INFO_LENGTH_MISMATCH: Self = Self(0xc000_0004);
    pub const INVALID_VIEW_SIZE: Self = Self(0xc000_001f);
    pub const INVALID_PARAMETER: Self = Self(0xc000_000d);
    pub const NO_SUCH_FILE: Self = Self(0xc000_000f);
    pub const INVALID_DEVICE_REQUEST: Self = Self(0xc000_0010);
    pub const END_OF_FILE: Self = Self(0xc000_0011);
    pub const MORE_PROCESSING_REQUIRED: Self = Self(0xc000_0016);
    pub const ACCESS_DENIED: Self = Self(0xc000_0022);
    pub const BUFFER_TOO_SMALL: Self = Self(0xc000_0023);
    pub const OBJECT_NAME_INVALID: Self = Self(0xc000_0033);
    pub const OBJECT_NAME_NOT_FOUND: Self = Self(0xc000_0034);
    pub const OBJECT_NAME_COLLISION: Self = Self(0xc000_0035);
    pub const OBJECT_PATH_NOT_FOUND: Self = Self(0xc000_003a);
    pub const OBJECT_PATH_SYNTAX_BAD: Self = Self(0xc000_003b);
    pub const SHARING_VIOLATION: Self = Self(0xc000_0043);
    pub const NO_EAS_ON_FILE: Self = Self(0xc000_0052);
    pub const EAS_NOT_SUPPORTED: Self = Self(0xc000_004f);
    pub const FILE_LOCK_CONFLICT: Self = Self(0xc000_0054);
    pub const LOCK_NOT_GRANTED: Self = Self(0xc000_0055);
    pub const DELETE_PENDING: Self = Self(0xc000_0056);
    pub const LOGON_FAILURE: Self = Self(0xc000_006d);
    pub const RANGE_NOT_LOCKED: Self = Self(0xc000_007e);
    pub const IO_TIMEOUT: Self = Self(0xc000_00b5);
    pub const DISK_FULL: Self = Self(0xc000_007f);
    pub const INSUFFICIENT_RESOURCES: Self = Self(0xc000_009a);
    pub const MEDIA_WRITE_PROTECTED: Self = Self(0xc000_00a2);
    pub const INVALID_PIPE_STATE: Self = Self(0xc000_00ad);
    pub const PIPE_EMPTY: Self = Self(0xc000_00d9);
    pub const BAD_IMPERSONATION_LEVEL: Self = Self(0xc000_00a5);
    pub const FILE_IS_A_DIRECTORY: Self = Self(0xc000_00ba);
    pub const NOT_SUPPORTED: Self = Self(0xc000_00bb);
    pub const BAD_NETWORK_NAME: Self = Self(0xc000_00cc);
    pub const REQUEST_NOT_ACCEPTED: Self = Self(0xc000_00d0);
    pub const NOT_SAME_DEVICE: Self = Self(0xc000_00d4);
    pub const INTERNAL_ERROR: Self = Self(0xc000_00e5);
    pub const DIRECTORY_NOT_EMPTY: Self = Self(0xc000_0101);
    pub const NOT_A_DIRECTORY: Self = Self(0xc000_0103);
    pub const TOO_MANY_OPENED_FILES: Self = Self(0xc000_011f);
    pub const CANCELLED: Self = Self(0xc000_0120);
    pub const CANNOT_DELETE: Self = Self(0xc000_0121);
    pub const FILE_CLOSED: Self = Self(0xc000_0128);
    pub const FS_DRIVER_REQUIRED: Self = Self(0xc000_019c);
    pub const USER_SESSION_DELETED: Self = Self(0xc000_0203);
    pub const NETWORK_NAME_DELETED: Self = Self(0xc000_00c9);
    pub const NOT_FOUND: Self = Self(0xc000_0225);
    pub const INVALID_LOCK_RANGE: Self = Self(0xc000_01a1);
    pub const NOT_A_REPARSE_POINT: Self = Self(0xc000_0275);
}

impl From<Errno> for Status {
    fn from(error: Errno) -> Self {
        match error {
            Errno::NOENT => Self::OBJECT_NAME_NOT_FOUND,
            Errno::EXIST => Self::OBJECT_NAME_COLLISION,
            Errno::NOTDIR => Self::NOT_A_DIRECTORY,
            Errno::ISDIR => Self::FILE_IS_A_DIRECTORY,
            Errno::NOTEMPTY => Self::DIRECTORY_NOT_EMPTY,
            Errno::NOSPC | Errno::DQUOT | Errno::FBIG => Self::DISK_FULL,
            Errno::ROFS => Self::MEDIA_WRITE_PROTECTED,
            Errno::MFILE | Errno::NFILE => Self::TOO_MANY_OPENED_FILES,
            Errno::NOMEM => Self::INSUFFICIENT_RESOURCES,
            Errno::NAMETOOLONG => Self::OBJECT_NAME_INVALID,
            Errno::XDEV => Self::NOT_SAME_DEVICE,
            Errno::INVAL => Self::INVALID_PARAMETER,
            Errno::OPNOTSUPP | Errno::NOSYS => Self::NOT_SUPPORTED,
            // A symbolic link in a path is refused with LOOP. It leads nowhere for the client.
            Errno::LOOP | Errno::NXIO | Errno::ACCESS | Errno::PERM => Self::ACCESS_DENIED,
            _ => Self::INTERNAL_ERROR,
        }
    }
}
