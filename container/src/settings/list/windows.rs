//! Variables of Windows: its version and setup, the account, the download, and shared folders.

use crate::settings::variable::{Variable, variables};

pub(super) const WINDOWS: &[Variable] = variables! {
    /// Which Windows: a version of the list, the URL of a medium, the name of a file on the volume,
    /// or `probe`, the guest that is built in and shows what it finds.
    done "VERSION" = "11" (windows.version): Version;
    /// The edition that is installed where a medium has several.
    done "EDITION" = "" (windows.edition);
    /// The language of Windows, and of region and keyboard where those are not said.
    done "LANGUAGE" = "en" (windows.language): Language;
    /// The culture of dates and numbers.
    done "REGION" = "" (windows.region);
    /// The keyboard.
    done "KEYBOARD" = "" (windows.keyboard);
    /// The product key.
    done "KEY" = "" (windows.key);
    /// The width of the screen in pixels.
    done "WIDTH" = "1280" (windows.width);
    /// The height of the screen in pixels.
    done "HEIGHT" = "720" (windows.height);
    /// Nothing is answered: a person installs by hand, at the screen. Windows 11 gets a machine
    /// with Secure Boot and a TPM then, unless BOOT_MODE is said.
    done "MANUAL" = "N" (windows.manual);
    /// A command that runs at the end of the installation, after those of /oem/install.bat.
    done "COMMAND" = "" (windows.command);
    /// What install.bat writes is kept, in C:\OEM\install.log.
    done "LOG" = "N" (windows.log);
};

pub(super) const ACCOUNT: &[Variable] = variables! {
    /// The account that is made in Windows, and who may see the screen. With DOMAIN: an account
    /// there, which Windows logs on.
    done "USERNAME" = "Docker" (account.user);
    /// The password of the account, of the built-in Administrator, and of the screen.
    done "PASSWORD" = "admin" (account.password);
    /// Windows logs the account on by itself.
    done "AUTOLOGIN" = "Y" (account.autologin);
    /// The domain of Active Directory that Windows joins; it needs USERNAME and PASSWORD.
    done "DOMAIN" = "" (account.domain);
    /// The organizational unit of the computer in the domain.
    done "DOMAIN_OU" = "" (account.unit);
    /// The workgroup that Windows joins.
    done "WORKGROUP" = "" (account.workgroup);
    /// The name of the computer in Windows and on the network; else a random one, and Windows.
    done "HOST" or "VM_NET_HOST" = "" (account.host);
};

pub(super) const MEDIA: &[Variable] = variables! {
    /// What was downloaded is compared with the checksum that is known of it.
    done "VERIFY" = "N" (media.verify);
    /// The medium is deleted once Windows starts from its disk.
    done "REMOVE" = "Y" (media.remove);
    /// Microsoft is asked for the medium as its download page does it.
    done "MIDO" = "Y" (media.mido);
    /// Microsoft's catalogue of upgrade images is asked too.
    done "ESD" = "Y" (media.esd);
    /// How many connections a download uses.
    done "CONNECTIONS" = "4" (media.connections);
    /// What was downloaded is an archive with the medium inside.
    done "UNPACK" = "N" (media.unpack);
    /// An old way to make the medium anew.
    ignored "REBUILD" = "N" => "media are never changed here: leave it out";
};

pub(super) const SHARES: &[Variable] = variables! {
    /// A network share with the folder /shared.
    ignored "SAMBA" = "N"
        => "there is no share of our own: mount an ISO of the files as /mount.iso, or copy them "
        "through a remote desktop";
    /// What the share's server says.
    ignored "SAMBA_DEBUG" = "N" => "there is no share of our own: leave it out";
    /// The share cannot be written.
    ignored "SAMBA_READONLY" = "N" => "there is no share of our own: leave it out";
    /// Where the share's configuration is written.
    ignored "SAMBA_CONFIG" = "" => "there is no share of our own: leave it out";
    /// A further interface of the share.
    ignored "SAMBA_INTERFACE" = "" => "there is no share of our own: leave it out";
    /// A shortcut to the share on the desktop.
    ignored "SHORTCUT" = "N" => "there is no share of our own: leave it out";
    /// Further folders of the share, in old versions.
    ignored "SHARES" = ""
        => "there is no share of our own: put files into /oem before the installation, or copy "
        "them through a remote desktop";
};
